"""Whole tasks through the harness: metrics, shots, versions, and no network."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import yaml
from small import Counting, word_tokenizer

from olmo_core_jax.errors import UserError
from olmo_core_jax.evaluate.harness import OlmoLM
from olmo_core_jax.evaluate.scoring import TokenScores
from olmo_core_jax.evaluate.tasks import TaskResults, require_comparable, run_tasks, task_figures
from olmo_core_jax.recipes.schema import Evaluation

CHOICE = {
    "task": "choice",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "{TASKS_DIR}/choice.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": m} for m in ("acc", "acc_norm", "acc_bytes")],
    "metadata": {"version": 3.0},
}


def write_task(folder, documents, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    task = CHOICE | changes
    (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    (folder / "choice.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    return Evaluation(tasks_path=str(folder), tasks=[task["task"]])


class Table:
    """A model that gives each target token its own log-probability, whatever stands before it."""

    def __init__(self, logp):
        self.logp = np.array(logp, np.float32)

    def __call__(self, tokens_BS, targets_BS) -> TokenScores:
        return TokenScores(self.logp[targets_BS], np.zeros_like(targets_BS))


def test_acc_norm_is_per_character_and_acc_bytes_per_byte(tmp_path):
    words = ("question", "naïveté", "abcdefgh")
    assert (len(words[1]), len(words[1].encode())) == (7, 9)
    documents = [{"context": words[0], "choices": list(words[1:]), "answer": 1}]
    evaluation = write_task(tmp_path / "tasks", documents)
    lm = OlmoLM(
        Table([0.0, -7.5, -8.0]), word_tokenizer(*words), eos_id=0, max_length=32, batch_size=1
    )
    results = run_tasks(lm, evaluation)
    assert results.scores["choice"] == {"acc": 0.0, "acc_norm": 1.0, "acc_bytes": 0.0}
    assert results.settings["choice"] == {"version": "3.0", "n_shot": "0", "limit": "None"}


def mmlu_task(folder):
    """The packaged MMLU template on six dev and one test question of our own."""
    from importlib.resources import files

    from datasets import Dataset

    def rows(split, n):
        return [
            {"question": f"{split} {i}?", "choices": list("wxyz"), "answer": i % 4}
            for i in range(n)
        ]

    names = {}
    for split, n in (("dev", 6), ("test", 1)):
        Dataset.from_list(rows(split, n)).save_to_disk(folder / split)
        names[split] = f"{{TASKS_DIR}}/{split}/data-00000-of-00001.arrow"
    template = files("lm_eval") / "tasks/mmlu/default/_default_template_yaml"
    task = {
        "include": str(template),
        "task": "mmlu_of_ours",
        "dataset_path": "arrow",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": names},
        "num_fewshot": 5,
    }
    (folder / "mmlu_of_ours.yaml").write_text(yaml.safe_dump(task))
    return Evaluation(tasks_path=str(folder), tasks=["mmlu_of_ours"])


@pytest.mark.parametrize("seed", [0, 1])
def test_five_shots_are_the_first_five_dev_rows_whatever_the_seed(tmp_path, seed):
    seen = []

    class Recording(OlmoLM):
        def loglikelihood(self, requests, disable_tqdm=False):
            seen.extend(r.args[0] for r in requests)
            return [(-1.0 - r.idx, False) for r in requests]

    lm = Recording(Counting(), word_tokenizer("x"), eos_id=0, max_length=64, batch_size=1)
    results = run_tasks(lm, mmlu_task(tmp_path), seed=seed)
    (prompt,) = set(seen)
    places = [prompt.index(f"dev {i}?") for i in range(5)]
    assert places == sorted(places) and "dev 5?" not in prompt
    assert prompt.endswith("Answer:") and prompt.count("Answer:") == 6
    assert "test 0?" in prompt[places[-1] :]
    assert results.settings["mmlu_of_ours"]["n_shot"] == "5"
    assert results.settings["mmlu_of_ours"]["version"] not in ("", "None")
    assert results.scores["mmlu_of_ours"]["acc"] == 1.0


def test_other_versions_shots_or_samples_are_not_compared():
    ours = {"t": {"version": "1.0", "n_shot": "5", "limit": "None"}}
    require_comparable(ours, {"t": {"version": 1.0, "n_shot": 5, "limit": None}, "other": {}})
    for change in ({"version": 2.0}, {"n_shot": 0}, {"limit": 10}):
        with pytest.raises(UserError, match=f"task t: {next(iter(change))}"):
            require_comparable(ours, {"t": change})


def test_figures_stand_beside_the_reference():
    ours = TaskResults({"t": {"acc": 0.5, "acc_norm": 0.25}}, {}, 1, 3)
    figures = task_figures(ours, {"t": {"acc,none": 0.25, "alias": "t"}})
    assert figures == {
        "lm_eval/t/acc": 0.5,
        "lm_eval/t/acc (reference)": 0.25,
        "lm_eval/t/acc_norm": 0.25,
        "lm_eval max |difference|": 0.25,
        "truncated_samples": 1,
        "tokens_cut": 3,
    }


def test_unknown_tasks_and_missing_data_are_named(tmp_path):
    lm = OlmoLM(Counting(), word_tokenizer(*"0123456789"), eos_id=9, max_length=64, batch_size=1)
    evaluation = write_task(tmp_path / "tasks", [])
    with pytest.raises(UserError, match=r"no_such_task not found in .*tasks"):
        run_tasks(lm, evaluation.model_copy(update={"tasks": ["no_such_task"]}))
    (tmp_path / "tasks/choice.jsonl").unlink()
    with pytest.raises(UserError, match=r"choice\.jsonl"):
        run_tasks(lm, evaluation)
    with pytest.raises(UserError, match="no folder"):
        run_tasks(lm, evaluation.model_copy(update={"tasks_path": str(tmp_path / "none")}))


OFFLINE = """
    import socket, sys, time
    def refuse(*a, **k):
        raise AssertionError(f"network: {a[1:]}")
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
    sys.path[:0] = sys.argv[2:]
    from small import counting_lm
    from olmo_core_jax.errors import UserError
    from olmo_core_jax.evaluate.tasks import run_tasks
    from olmo_core_jax.recipes.schema import Evaluation
    lm, _ = counting_lm()
    evaluation = Evaluation(tasks_path=sys.argv[1], tasks=["choice"])
    print(run_tasks(lm, evaluation).scores["choice"]["acc"])
    try:
        run_tasks(lm, evaluation.model_copy(update={"tasks": ["from_the_hub"]}))
    except UserError as e:
        print("refused:", e)
"""


def test_ten_questions_without_a_network(tmp_path):
    documents = [
        {"context": f"0 {i}", "choices": [str((i + 1) % 10), str((i + 2) % 10)], "answer": i % 2}
        for i in range(10)
    ]
    folder = tmp_path / "tasks"
    write_task(
        folder, documents, task="from_the_hub", dataset_path="nobody/nothing", dataset_kwargs={}
    )
    write_task(folder, documents)
    from pathlib import Path

    command = [
        sys.executable,
        "-c",
        textwrap.dedent(OFFLINE),
        str(folder),
        str(Path(__file__).parents[1] / "support"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "0.5"
    assert "refused: evaluation.tasks" in done.stdout and "nobody/nothing" in done.stdout

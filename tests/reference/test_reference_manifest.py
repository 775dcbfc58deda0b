"""The committed laptop reference is whole and is what its manifest says."""

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

LAPTOP = Path(__file__).resolve().parents[2] / "olmo_core_jax/recipes/laptop"
STAGES = ("stage1", "stage2")
CURVES = ("curve.csv", "curve_foreach_off.csv")


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((LAPTOP / "MANIFEST.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(LAPTOP / "tokenizer/tokenizer.json"))


def mix_entries(manifest: dict, stage: str) -> list[tuple[str, Path]]:
    """(label, token file) of every line of a stage's mix."""
    lines = (LAPTOP / manifest["stages"][stage]["mix"]).read_text().splitlines()
    pairs = [line.split(",") for line in lines if not line.startswith("#")]
    name = manifest["tokenizer"]["name"]
    return [(label, LAPTOP / "data" / path.replace("{TOKENIZER}", name)) for label, path in pairs]


def token_file(path: Path) -> np.ndarray:
    return np.fromfile(path, "<u2")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_file_has_its_digest(manifest):
    found = {
        path.relative_to(LAPTOP).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in LAPTOP.rglob("*")
        if path.is_file() and path.name != "MANIFEST.json"
    }
    assert found == {name: entry["sha256"] for name, entry in manifest["files"].items()}


def test_everything_is_under_30_megabytes():
    assert sum(path.stat().st_size for path in LAPTOP.rglob("*") if path.is_file()) < 30e6


@pytest.mark.parametrize("stage", STAGES)
def test_token_files_are_sound(manifest, stage):
    counts: dict[str, int] = {}
    eos, vocab = manifest["tokenizer"]["eos_token_id"], manifest["tokenizer"]["vocab_size"]
    for label, path in mix_entries(manifest, stage):
        tokens = token_file(path)
        assert tokens.max() < vocab
        assert tokens[-1] == eos
        assert len(tokens) % manifest["sequence_length"], "no remainder to drop"
        counts[label] = counts.get(label, 0) + len(tokens)
    recorded = dict(manifest["corpus"]["tokens"][stage])
    assert recorded.pop("total") == sum(counts.values())
    assert recorded == counts


def test_stage_1_is_large_and_stage_2_is_other_and_cleaner(manifest):
    first, second = (dict(mix_entries(manifest, stage)) for stage in STAGES)
    files = [{path for _, path in mix_entries(manifest, stage)} for stage in STAGES]
    assert manifest["corpus"]["tokens"]["stage1"]["total"] >= 2_000_000
    assert len(first) >= 5
    assert not files[0] & files[1]
    assert "noise" in first and "noise" not in second


def test_heldout_documents_are_in_no_training_text(manifest, tokenizer):
    paths = {path for stage in STAGES for _, path in mix_entries(manifest, stage)}
    training = "\0".join(
        tokenizer.decode(token_file(path).tolist(), skip_special_tokens=False)
        for path in sorted(paths)
    )
    heldout = [json.loads(s) for s in (LAPTOP / "heldout/documents.jsonl").read_text().splitlines()]
    assert len({document["domain"] for document in heldout}) >= 4
    # A document that is in training is found by the same search: the search works.
    eos = manifest["tokenizer"]["eos_token_id"]
    some = token_file(min(paths))
    known = tokenizer.decode(some[: np.flatnonzero(some == eos)[0]].tolist())
    assert known.strip() in training
    assert [d["text"][:60] for d in heldout if d["text"].strip() in training] == []


def test_heldout_tokens_are_the_heldout_documents(manifest, tokenizer):
    tokens: dict[str, list[int]] = {}
    for line in (LAPTOP / "heldout/documents.jsonl").read_text().splitlines():
        document = json.loads(line)
        ids = tokenizer.encode(document["text"], add_special_tokens=False).ids
        tokens.setdefault(document["domain"], []).extend(
            [*ids, manifest["tokenizer"]["eos_token_id"]]
        )
    for domain, ids in tokens.items():
        np.testing.assert_array_equal(token_file(LAPTOP / f"heldout/{domain}.npy"), ids)


def test_special_tokens_are_last(manifest, tokenizer):
    assert tokenizer.get_vocab_size() == manifest["tokenizer"]["vocab_size"] == 2048
    assert tokenizer.token_to_id("<|endoftext|>") == manifest["tokenizer"]["eos_token_id"] == 2046
    assert tokenizer.token_to_id("<|pad|>") == manifest["tokenizer"]["pad_token_id"] == 2047


@pytest.mark.parametrize("stage", STAGES)
def test_curves_and_batches_have_every_update(manifest, stage):
    updates = [str(step) for step in range(1, manifest["stages"][stage]["end_step"] + 1)]
    for name in (*CURVES, "batches.csv"):
        assert [row["step"] for row in rows(LAPTOP / stage / name)] == updates
    for name in CURVES:
        for row in rows(LAPTOP / stage / name):
            assert all(np.isfinite(float(value)) for value in row.values())


def test_stage_2_ends_at_a_learning_rate_of_zero():
    learning_rates = [float(row["optim/LR (group 0)"]) for row in rows(LAPTOP / "stage2/curve.csv")]
    assert learning_rates[-1] == 0.0
    assert min(learning_rates[:-1]) > 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_agrees_with_itself(manifest, stage):
    key = "train/CE loss"
    run, other = (rows(LAPTOP / stage / name) for name in CURVES)
    gaps = [abs(float(a[key]) - float(b[key])) for a, b in zip(run, other, strict=True)]
    assert max(gaps) == manifest["stages"][stage]["self_agreement"]["max_abs_ce_difference"]
    assert 0.0 < max(gaps) < 1e-5


def test_updates_are_skipped_by_a_clear_margin(manifest):
    seen = []
    for name, recorded in zip(CURVES, manifest["stages"]["stage1"]["skips"], strict=True):
        curve = rows(LAPTOP / "stage1" / name)
        skipped = [int(row["step"]) for row in curve if row["optim/step skipped"] == "1"]
        scores = {step: guard_score(curve, step) for step in range(64, len(curve) + 1)}
        assert skipped and min(scores[step] for step in skipped) > 8
        assert max(score for step, score in scores.items() if step not in skipped) < 5
        assert skipped == [int(step) for step in recorded["skipped"]]
        seen.append(skipped)
    assert seen[0] == seen[1]


def guard_score(curve: list[dict[str, str]], step: int) -> float:
    """The larger of both scores of an update against its up to 128 predecessors."""
    scores = []
    for column in ("train/CE loss", "optim/total grad norm"):
        values = np.array([float(row[column]) for row in curve[max(0, step - 129) : step]])
        scores.append((values[-1] - values[:-1].mean()) / values[:-1].std(ddof=1))
    return max(scores)


def test_every_hf_checkpoint_has_its_scores(manifest):
    losses, scores = (
        json.loads((LAPTOP / name).read_text()) for name in ("heldout_loss.json", "lm_eval.json")
    )
    for stage in STAGES:
        steps = {str(step) for step in manifest["stages"][stage]["hf_steps"]}
        assert set(losses[stage]) == set(scores[stage]) == steps
        assert {p.name for p in (LAPTOP / stage / "hf").iterdir()} == {f"step{s}" for s in steps}
    start, end = losses["stage1"]["0"], losses["stage2"]["120"]
    assert all(end[domain] < start[domain] - 0.5 for domain in start), "it did not learn"
    assert set(scores["stage1"]["0"]) == {"laptop_continuation", "laptop_bits"}

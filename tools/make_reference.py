"""Make the laptop reference with the real OLMo-core: texts, tokenizer, two training stages, scores.

    python tools/make_reference.py                 all of it, into olmo_core_jax/recipes/laptop
    python tools/make_reference.py --from train    keep tokenizer and data as they are

Steps: data, train, export, evaluate, manifest. Each leaves what the next needs in --out and --work,
so a broken run is taken up with --from. Needs the extra `reference` and lm-eval; the step `data`
also needs a Debian system (apt-get and dpkg, no root) and PyPI.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from reference import settings

ROOT = Path(__file__).resolve().parent.parent
# Neutral on purpose: OLMo-core writes the folder of a checkpoint into its metadata.
WORK = Path(tempfile.gettempdir()) / "olmo-core-jax-reference"
STEPS = ["data", "train", "export", "evaluate", "manifest"]


def make_data(out: Path, work: Path) -> None:
    """Fetch the texts; write tokenizer/, data/, mixes/, heldout/, tasks/, licenses/."""
    from reference import corpus, sources, tasks

    sources.fetch(work / "sources")
    for folder in ("tokenizer", "data", "mixes", "heldout", "tasks", "licenses"):
        shutil.rmtree(out / folder, ignore_errors=True)
    print(corpus.build(sources.documents(work / "sources"), out))
    tasks.build(out)
    (out / "licenses").mkdir()
    for name, text in sources.licence_texts(work / "sources").items():
        (out / "licenses" / name).write_bytes(text)


def make_training(out: Path, work: Path) -> None:
    """Both stages twice, foreach on (the reference) and off (the band), side by side."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(_train_both_stages, out, work, foreach) for foreach in (True, False)]
        for run in runs:
            run.result()


def _train_both_stages(out: Path, work: Path, foreach: bool) -> None:
    from reference.training import run_stage

    logging.basicConfig(level=logging.ERROR)
    previous = None
    for stage in settings.stages():
        folder, recorder = run_stage(out, work, stage, foreach, previous)
        results = out / stage["name"]
        results.mkdir(parents=True, exist_ok=True)
        curve = results / ("curve.csv" if foreach else "curve_foreach_off.csv")
        recorder.write(curve, results / "batches.csv" if foreach else None)
        previous = folder / f"step{settings.end_step(stage)}"


def make_exports(out: Path, work: Path) -> None:
    """HF exports, native checkpoints and the parity logits."""
    from reference.evaluate import export_hf, write_parity
    from reference.training import copy_native

    for stage in settings.stages():
        results = out / stage["name"]
        for folder in ("hf", "native"):
            shutil.rmtree(results / folder, ignore_errors=True)
        for step in stage["hf_steps"]:
            checkpoint = work / stage["name"] / f"step{step}"
            export_hf(checkpoint, results / f"hf/step{step}", out / "tokenizer")
        for step in stage["native_steps"]:
            copy_native(work / stage["name"] / f"step{step}", results / f"native/step{step}", out)
    step0 = work / "stage1/step0"
    gap = write_parity(step0, out / "stage1/hf/step0", out / "heldout", out / "parity/logits.npz")
    print(f"parity: transformers' logits within {gap:.1e} of OLMo-core's")


def make_scores(out: Path, work: Path) -> None:
    """Held-out loss and lm-evaluation-harness scores of every exported checkpoint."""
    from reference.evaluate import heldout_loss, lm_eval_scores, write_json

    losses, scores = {}, {}
    for stage in settings.stages():
        for step in stage["hf_steps"]:
            hf = out / stage["name"] / f"hf/step{step}"
            losses.setdefault(stage["name"], {})[str(step)] = heldout_loss(hf, out / "heldout")
            scores.setdefault(stage["name"], {})[str(step)] = lm_eval_scores(hf, out, work)
    write_json(out / "heldout_loss.json", losses)
    write_json(out / "lm_eval.json", scores)


def make_manifest(out: Path, work: Path) -> None:
    """Digests, versions, settings, self-agreement."""
    from reference import manifest

    times = json.loads((work / "seconds.json").read_text())
    made = manifest.make(out, times)
    (out / "MANIFEST.json").write_text(json.dumps(made, indent=1) + "\n")
    for name, stage in made["stages"].items():
        print(name, json.dumps({k: stage[k] for k in ("self_agreement", "skips")}, indent=1))
    print(f"{sum(f['bytes'] for f in made['files'].values()) / 1e6:.1f} MB under {out}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "olmo_core_jax/recipes/laptop")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--from", dest="first", choices=STEPS, default=STEPS[0])
    parser.add_argument("--to", dest="last", choices=STEPS, default=STEPS[-1])
    arguments = parser.parse_args()
    out, work = arguments.out.resolve(), arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    makers = [make_data, make_training, make_exports, make_scores, make_manifest]
    steps = dict(zip(STEPS, makers, strict=True))
    record = work / "seconds.json"
    times = json.loads(record.read_text()) if record.exists() else {}
    for step in STEPS[STEPS.index(arguments.first) : STEPS.index(arguments.last) + 1]:
        print(f"== {step}", flush=True)
        start = time.perf_counter()
        steps[step](out, work)
        times[step] = time.perf_counter() - start
        record.write_text(json.dumps(times))
        print(f"   {times[step]:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""OLMo-core's own loader, run again over the committed files, gives the committed batches."""

import csv
import hashlib
import json
from pathlib import Path

import pytest

olmo_data = pytest.importorskip("olmo_core.data")

LAPTOP = Path(__file__).resolve().parents[2] / "olmo_core_jax/recipes/laptop"


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_batches_are_those_of_olmo_core(stage, tmp_path):
    manifest = json.loads((LAPTOP / "MANIFEST.json").read_text())
    settings, names = manifest["stages"][stage], manifest["tokenizer"]
    lines = (LAPTOP / settings["mix"]).read_text().splitlines()
    paths = [
        str(LAPTOP / "data" / line.split(",")[1].replace("{TOKENIZER}", names["name"]))
        for line in lines
        if not line.startswith("#")
    ]
    dataset = olmo_data.NumpyFSLDatasetConfig(
        tokenizer=olmo_data.TokenizerConfig(
            vocab_size=names["vocab_size"],
            eos_token_id=names["eos_token_id"],
            pad_token_id=names["pad_token_id"],
        ),
        paths=paths,
        sequence_length=manifest["sequence_length"],
        work_dir=str(tmp_path),
    ).build()
    loader = olmo_data.NumpyDataLoaderConfig(
        global_batch_size=manifest["batch_tokens"], seed=settings["data_seed"], num_workers=0
    ).build(dataset, dp_process_group=None)
    loader.reshuffle(1)
    with (LAPTOP / stage / "batches.csv").open() as file:
        expected = [row["sha256"] for row in csv.DictReader(file)]
    found = []
    for batch in loader:
        tokens = batch["input_ids"].numpy().astype("<u4")
        found.append(hashlib.sha256(tokens.tobytes()).hexdigest())
        if len(found) == len(expected):
            break
    assert found == expected

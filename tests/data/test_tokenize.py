"""Text to shards: what the tokenizers library says, EOS after every document, files that index."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from olmo_core_jax.data.build import build_index
from olmo_core_jax.data.tokenize import tokenize
from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes import schema

TEXTS = [
    f"The {i} quick brown foxes jump over {i * i} lazy dogs. " * (i % 5 + 1) for i in range(60)
]


@pytest.fixture
def tokenizer(tmp_path):
    """(folder of a small BPE tokenizer, EOS id)."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(TEXTS, trainer)
    (tmp_path / "tok").mkdir()
    made.save(str(tmp_path / "tok" / "tokenizer.json"))
    return str(tmp_path / "tok"), made


@pytest.fixture
def inputs(tmp_path):
    """The same texts as JSONL, gzipped JSONL and one plain file."""
    lines = [json.dumps({"text": t, "id": i}) for i, t in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:30]) + "\n\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as f:
        f.write("\n".join(lines[30:59]))
    (tmp_path / "c.txt").write_text(TEXTS[59])
    return [str(tmp_path / n) for n in ("a.jsonl", "b.jsonl.gz", "c.txt")]


def test_documents_end_with_eos_and_index(tokenizer, inputs, tmp_path):
    folder, made = tokenizer
    done = tokenize(inputs, folder, 0, str(tmp_path / "out"), label="fox", tokens_a_shard=500)
    expected = [[*made.encode(t, add_special_tokens=False).ids, 0] for t in TEXTS]
    files = sorted((tmp_path / "out").glob("*.npy"))
    shards = [np.fromfile(f, "<u2") for f in files]
    assert np.array_equal(np.concatenate(shards), np.concatenate(expected))
    assert all(s[-1] == 0 and len(s) < 500 + 200 for s in shards) and len(shards) > 3
    assert (done.documents, done.tokens, done.eos_inside) == (60, sum(map(len, expected)), 0)
    data = schema.Data(mix=done.mix, base=str(tmp_path / "out"), sequence_length=16, seed=1)
    index = build_index(data, schema.Tokenizer(name="t", eos_id=0, pad_id=1), made.get_vocab_size())
    assert index.dtype == "uint16" and index.labels().keys() == {"fox"}
    assert index.instances == sum(len(s) // 16 for s in shards)


def test_eos_in_a_text_is_counted(tokenizer, tmp_path):
    (tmp_path / "x.txt").write_text("one<|endoftext|>two")
    done = tokenize([str(tmp_path / "x.txt")], tokenizer[0], 0, str(tmp_path / "out"))
    assert done.eos_inside == 1


def test_nothing_is_overwritten(tokenizer, inputs, tmp_path):
    out = tmp_path / "out"
    tokenize(inputs, tokenizer[0], 0, str(out))
    before = {p: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(UserError, match="is not empty"):
        tokenize(inputs, tokenizer[0], 0, str(out))
    assert before == {p: p.read_bytes() for p in out.iterdir()}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "x"}\n{"body": "y"}\n', "line 2 is no JSON object with text 'text'"),
        ("a.jsonl", "not json\n", "line 1 is no JSON"),
        ("a.jsonl", '{"text": 5}\n', "line 1 is no JSON"),
        ("a.jsonl", "", "no documents"),
    ],
)
def test_bad_input(tokenizer, tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        tokenize([str(tmp_path / name)], tokenizer[0], 0, str(tmp_path / "out"))


def test_bad_tokenizer(tokenizer, inputs, tmp_path):
    with pytest.raises(UserError, match="has no token 5000"):
        tokenize(inputs, tokenizer[0], 5000, str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"tokenizer.json does not exist"):
        tokenize(inputs, str(tmp_path), 0, str(tmp_path / "out"))
    Path(tmp_path, "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is no tokenizer"):
        tokenize(inputs, str(tmp_path), 0, str(tmp_path / "out"))

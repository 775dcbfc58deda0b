"""The index: instances, fingerprints, idempotence, and every kind of bad input refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mixes import EOS, TOKENIZER, VOCAB, make_recipe

from olmo_core_jax.data.build import build_index
from olmo_core_jax.data.index import default_dtype, index_uri, load_index, save_index
from olmo_core_jax.data.read_batch import BatchReader
from olmo_core_jax.errors import UserError


def build(mix, sequence_length=32, **options):
    return build_index(mix.data(sequence_length, **options), TOKENIZER, VOCAB)


def test_instances_never_cross_files(make_mix):
    mix = make_mix()
    index = build(mix)
    whole = [a[: len(a) // 32 * 32].reshape(-1, 32) for a in mix.files.values()]
    assert index.instances == sum(len(w) for w in whole) < sum(map(len, mix.files.values())) // 32
    tokens, mask = BatchReader(index)(np.arange(index.instances))
    assert np.array_equal(tokens, np.concatenate(whole)) and mask.all()
    assert tokens.dtype == np.int32


def test_longest_target_cuts_the_files(make_mix):
    mix = make_mix(lengths=(500, 333))
    index = build(mix, max_target_sequence_length=128)
    assert index.chunk == 4
    assert [s.instances for s in index.shards] == [500 // 128 * 4, 333 // 128 * 4]
    with pytest.raises(UserError, match="max_target_sequence_length 100 is not a multiple of 32"):
        build(mix, max_target_sequence_length=100)


def test_source_permutation_reorders_files(make_mix):
    mix = make_mix()
    paths = [s.path for s in build(mix).shards]
    shuffled = [s.path for s in build(mix, source_permutation_seed=123).shards]
    assert sorted(paths) == sorted(shuffled) and paths != shuffled


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_true_npy_files_hold_the_same_instances(make_mix, dtype):
    raw = make_mix(dtype=np.dtype(dtype).newbyteorder("<"), name="raw")
    headed = make_mix(dtype=np.dtype(dtype).newbyteorder("<"), name="headed")
    for path, tokens in headed.files.items():
        np.save(path, tokens)
    one, two = build(raw, dtype=dtype), build(headed, dtype=dtype)
    assert one.instances == two.instances and two.shards[0].start > 0
    ids = np.arange(one.instances)
    assert np.array_equal(BatchReader(one)(ids)[0], BatchReader(two)(ids)[0])
    assert one.fingerprint != two.fingerprint


def test_dtype_by_vocabulary():
    sizes = {256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32", 100278: "uint32"}
    assert {v: default_dtype(v) for v in sizes} == sizes


def test_same_files_elsewhere_have_the_same_fingerprint(make_mix):
    one, two = build(make_mix(name="here")), build(make_mix(name="there"))
    assert one.fingerprint == two.fingerprint and one.base != two.base


@pytest.mark.parametrize("where", [0, 100, 700, 1999])
def test_fingerprint_sees_content(make_mix, where):
    before = build(make_mix())
    mix = make_mix()
    path = list(mix.files)[2]
    tokens = mix.files[path].copy()
    tokens[where] ^= 1
    tokens.tofile(path)
    assert build(mix).fingerprint != before.fingerprint


def test_rebuilding_changes_nothing(make_mix, tmp_path):
    index = build(make_mix())
    save_index(str(tmp_path / "out"), index)
    written = Path(index_uri(str(tmp_path / "out")))
    stamp, text = written.stat().st_mtime_ns, written.read_bytes()
    save_index(str(tmp_path / "out"), build(make_mix()))
    assert (written.stat().st_mtime_ns, written.read_bytes()) == (stamp, text)
    assert load_index(str(tmp_path / "out")) == index


def test_other_data_do_not_replace_an_index(make_mix, tmp_path):
    save_index(str(tmp_path / "out"), build(make_mix()))
    with pytest.raises(UserError, match=r"part-04.npy has 1400 bytes, was 1280"):
        save_index(str(tmp_path / "out"), build(make_mix(lengths=(500, 333, 2000, 31, 700))))
    with pytest.raises(UserError, match="has other content"):
        save_index(str(tmp_path / "out"), build(make_mix(seed=1)))


class TestRefusals:
    """Each fault is told with the file's name before anything is built."""

    def test_missing_shards_are_all_named(self, make_mix):
        mix = make_mix()
        for path in list(mix.files)[1:3]:
            Path(path).unlink()
        with pytest.raises(UserError) as e:
            build(mix)
        said = str(e.value)
        assert "2 problem(s)" in said
        assert all(f"{path} does not exist" in said for path in list(mix.files)[1:3])

    def test_half_a_token(self, make_mix):
        mix = make_mix()
        path = next(iter(mix.files))
        Path(path).write_bytes(Path(path).read_bytes()[:-1])
        with pytest.raises(UserError, match=f"{path} has 999 bytes, no multiple of 2"):
            build(mix)

    def test_npy_header_in_a_raw_mix(self, make_mix):
        mix = make_mix()
        path = list(mix.files)[3]
        np.save(path, mix.files[path])
        with pytest.raises(UserError, match=f"{path} has a .npy header"):
            build(mix)

    def test_npy_of_another_type(self, make_mix):
        mix = make_mix()
        for path, tokens in mix.files.items():
            np.save(path, tokens.astype("<i4" if "part-01" in path else "<u2"))
        with pytest.raises(UserError, match=r"part-01.npy is a .npy file of <i4, not uint16"):
            build(mix)

    def test_16_bit_tokens_read_as_32(self, make_mix):
        with pytest.raises(UserError, match=r"part-00.npy holds id \d+, the vocabulary has 1000"):
            build(make_mix(), dtype="uint32")

    def test_32_bit_tokens_read_as_16(self, make_mix):
        with pytest.raises(UserError, match="looks like uint32 tokens"):
            build(make_mix(dtype="<u4"), dtype="uint16")

    def test_id_outside_the_vocabulary_in_a_sample(self, make_mix):
        mix = make_mix()
        path = list(mix.files)[1]
        tokens = mix.files[path].copy()
        tokens[5] = VOCAB
        tokens.tofile(path)
        with pytest.raises(UserError, match=f"{path} holds id {VOCAB}"):
            build(mix)

    def test_no_eos_in_a_long_shard(self, make_mix):
        mix = make_mix()
        path = list(mix.files)[2]
        tokens = mix.files[path].copy()
        tokens[tokens == EOS] = 0
        tokens.tofile(path)
        with pytest.raises(UserError, match=f"{path} has no EOS {EOS} in its first 2000 tokens"):
            build(mix)
        assert build(mix, check_eos=False).instances

    def test_eos_outside_the_sampled_windows_is_found(self, make_mix):
        mix = make_mix(lengths=(40_000,))
        path = next(iter(mix.files))
        tokens = np.ones(40_000, "<u2")
        tokens[-1] = EOS
        tokens.tofile(path)
        assert build(mix).instances == 1250

    def test_files_shorter_than_an_instance(self, make_mix):
        with pytest.raises(UserError, match="no file holds a whole instance"):
            build(make_mix(lengths=(31, 30)))

    def test_other_sequence_length_than_the_index(self, make_mix, tmp_path):
        save_index(str(tmp_path), build(make_mix()))
        with pytest.raises(UserError, match="cut at sequence length 32, the recipe says 64"):
            load_index(str(tmp_path), sequence_length=64)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"version": 99}, "index of version 99"),
            ({"format": "other"}, "not an index of this project"),
            ({"dtype": "uint32"}, "damaged or edited"),
        ],
    )
    def test_index_of_another_kind(self, make_mix, tmp_path, change, said):
        save_index(str(tmp_path), build(make_mix()))
        content = json.loads(Path(index_uri(str(tmp_path))).read_text()) | change
        Path(index_uri(str(tmp_path))).write_text(json.dumps(content))
        with pytest.raises(UserError, match=said):
            load_index(str(tmp_path))

    def test_missing_index(self, tmp_path):
        with pytest.raises(UserError, match="run build_index first"):
            load_index(str(tmp_path))

    def test_id_outside_the_vocabulary_while_reading(self, make_mix):
        mix = make_mix()
        index = build(mix)
        path = list(mix.files)[2]
        tokens = mix.files[path].copy()
        tokens[100] = 60_000
        tokens.tofile(path)
        with pytest.raises(UserError, match=rf"{path} holds id 60000 at byte 200 \(instance 28\)"):
            BatchReader(index)(np.arange(index.instances))

    def test_ids_beyond_32_bits_do_not_wrap(self, make_mix):
        mix = make_mix(dtype="<u8")
        index = build(mix, dtype="uint64")
        path = next(iter(mix.files))
        tokens = mix.files[path].copy()
        tokens[3] = 2**32
        tokens.tofile(path)
        with pytest.raises(UserError, match=f"holds id {2**32} at byte 24"):
            BatchReader(index)(np.arange(2))

    def test_truncated_while_reading(self, make_mix):
        mix = make_mix()
        index = build(mix)
        path = list(mix.files)[4]
        Path(path).write_bytes(Path(path).read_bytes()[:700])
        with pytest.raises(UserError, match=f"{path} is truncated: 60 of 64 bytes at byte 640"):
            BatchReader(index)(np.arange(index.instances))


def test_olmo_core_fingerprint_depends_on_names_and_sizes_only(make_mix):
    index = build(make_mix())
    other = build(make_mix(seed=5))
    assert index.olmo_core_fingerprint == other.olmo_core_fingerprint
    assert index.olmo_core_fingerprint != replace(index, eos_id=1).olmo_core_fingerprint


def test_recipe_helper_describes_the_same_data(make_mix):
    mix = make_mix()
    assert make_recipe(mix).stage1.data == mix.data()

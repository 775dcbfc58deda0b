import json
import struct

import pytest

from olmo_core_jax import recipes
from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.flops import training_flops
from olmo_core_jax.recipes import schema
from olmo_core_jax.train.metrics import Meter, Update
from olmo_core_jax.train.run_log import LineLog, MetricsWriter

OLMO_CORE_NAMES = {
    "train/CE loss",
    "train/PPL",
    "train/Z loss",
    "train/Z loss unscaled",
    "optim/total grad norm",
    "optim/LR (group 0)",
    "optim/LR (group 1)",
    "optim/step skipped",
    "throughput/total tokens",
    "throughput/total petaflops",
    "throughput/device/data loading (s)",
}


def update(step: int = 3, **changes) -> Update:
    values = dict(ce_loss=2.5, z_loss=1e-4, grad_norm=0.5, skipped=0.0, learning_rate=3e-4)
    return Update(**{"step": step, **values, **changes})


def meter(recipe: str = "laptop", devices: int = 1, kind: str = "cpu") -> Meter:
    loaded = recipes.load_recipe(recipe)
    return Meter(loaded.model, loaded.stage1, devices, kind)


def test_names_and_values_are_olmo_cores():
    values = meter().values(update())
    assert set(values) == OLMO_CORE_NAMES | {"optim/step_skipped", "perf/total_tokens"}
    assert values["train/Z loss unscaled"] == 1e-4 / 1e-5
    assert values["train/PPL"] == pytest.approx(12.18249396)
    assert "train/PPL" not in meter().values(update(ce_loss=11.0))


def test_speed_is_absent_from_a_process_first_update_and_counts_all_devices():
    m = meter("olmo3_7b", devices=128, kind="TPU v5p")
    assert not [k for k in m.values(update()) if k.startswith("throughput/device/TPS")]
    assert m.tokens_per_second is None and m.mfu == "unknown"
    values = m.values(update(seconds=8.0, data_seconds=2.0))
    batch = m.stage.batch_tokens
    assert values["throughput/device/TPS"] == batch / 8 / 128
    assert values["throughput/device/BPS"] == 1 / 8
    assert values["throughput/device/data loading (%)"] == 25.0
    used = batch / 8 / 128 * training_flops(m.model, 8192)
    assert values["throughput/device/MFU"] == pytest.approx(100 * used / 459e12)
    m.values(update(seconds=4.0))
    assert m.tokens_per_second == 2 * batch / 12
    assert m.mfu == f"{100 * 2 * used * 8 / 12 / 459e12:.2f}"


def test_an_unknown_chip_has_no_utilisation():
    m = meter(kind="TPU v99")
    assert "throughput/device/MFU" not in m.values(update(seconds=1.0)) and m.mfu == "unknown"


def test_counters_do_not_overflow():
    m = meter("olmo3_7b")
    values = m.values(update(step=1_413_814, seconds=1.0))
    assert values["throughput/total tokens"] == 5_929_965_715_456
    assert values["perf/total_tokens"] == 5_929_965_715_456
    assert values["throughput/device/TPS"] > 0


def test_masked_instances_only_with_a_filter():
    m = meter()
    data = m.stage.data.model_copy(update={"repetition_filter": schema.RepetitionFilter()})
    filtered = Meter(m.model, m.stage.model_copy(update={"data": data}), 1, "cpu")
    assert filtered.values(update(masked=0.25))["train/masked instances (%)"] == 0.25
    assert "train/masked instances (%)" not in m.values(update(masked=0.25))


def test_lines_keep_all_digits_and_attempts_count(tmp_path):
    uri = str(tmp_path / "a" / "lines.jsonl")
    first = LineLog(uri)
    value = 0.1 + 2**-50
    first.write({"step": 1, "attempt": first.attempt, "x": value})
    assert json.loads((tmp_path / "a" / "lines.jsonl").read_text())["x"] == value
    with open(uri, "a") as f:
        f.write('{"step": 2, "att')  # killed in the middle of a line
    second = LineLog(uri)
    assert (first.attempt, second.attempt) == (1, 2)
    second.write({"step": 2, "attempt": second.attempt})
    second.write({"step": 3, "attempt": second.attempt})
    lines = (tmp_path / "a" / "lines.jsonl").read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[2]) == {"step": 2, "attempt": 2}
    assert LineLog(uri).attempt == 3


def events(folder) -> list:
    """All events of a folder, read record by record as TensorBoard does."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for file in sorted(folder.glob("events*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            sums = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[12 + length :][:4])
            assert sums == (masked_crc32c(data[:8]), masked_crc32c(data[12 : 12 + length]))
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_tensorboard_has_the_exact_names_and_forgets_what_is_repeated(tmp_path):
    writer = MetricsWriter(str(tmp_path), first_step=5)
    writer.write(5, meter().values(update(5)))
    writer.flush()
    found = events(tmp_path)
    logged = {v.tag: v.simple_value for e in found for v in e.summary.value}
    assert logged.keys() == meter().values(update(5)).keys()
    assert logged["train/CE loss"] == 2.5
    starts = [e for e in found if e.HasField("session_log")]
    assert [e.step for e in starts] == [5]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 5


def test_the_line_for_people_says_what_is_left():
    m = meter()
    assert m.line(update(10)) == "update 10/400: CE 2.5000, gradient norm 0.500, LR 3.000e-04"
    m.values(update(seconds=2.0))
    line = m.line(update(390, skipped=1.0))
    assert line.endswith("SKIPPED, 512 tokens/s, 0:00:20 left")


def test_a_folder_in_the_place_of_the_log_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read: Is a directory"):
        MetricsWriter(str(tmp_path), 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/metrics\.jsonl cannot be written: "):
        MetricsWriter(str(tmp_path / "file"), 1)

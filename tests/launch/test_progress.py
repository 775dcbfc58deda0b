"""What counts as progress: whole checkpoints only."""

from olmo_core_jax.launch.job import job_of
from olmo_core_jax.launch.progress import launches, newest_step, record_launch

META = {"uid": "0123456789", "name": "j", "creationTimestamp": "2026-01-02T03:04:05Z"}


def test_a_checkpoint_that_is_being_written_is_no_progress(tmp_path):
    job = job_of("stage1_train", "laptop", str(tmp_path))
    assert newest_step(job) is None
    root = tmp_path / "stage1_train" / "checkpoints"
    for step, whole in ((9, True), (10, True), (11, False)):
        (root / str(step) / "meta").mkdir(parents=True)
        if whole:
            (root / str(step) / "meta" / "files").write_text("{}")
    (root / "12.orbax-checkpoint-tmp-1").mkdir()
    assert newest_step(job) == 10


def test_a_launch_is_recorded_once(tmp_path):
    job = job_of("stage1_train", "laptop", str(tmp_path))
    for shape in ("v5p-4x4x8", "changed"):
        record_launch(job, {"metadata": META}, {"shape": shape})
    record_launch(job, {"metadata": META | {"uid": "abcdefgh1"}}, {"shape": "tpu7x-4x4x4"})
    assert sorted(x["shape"] for x in launches(str(tmp_path), "stage1_train")) == [
        "tpu7x-4x4x4",
        "v5p-4x4x8",
    ]

"""Which data an update saw, and proof that a run saw all of it once, whatever happened to it."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from mixes import make_recipe, make_run_root

from olmo_core_jax import storage
from olmo_core_jax.data.audit import audit, log_uri
from olmo_core_jax.data.instance_log import Line, digest
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.stage_data import build_stage_data
from olmo_core_jax.data.where import where
from olmo_core_jax.errors import UserError


class Run:
    """A run root whose `training` only reads and logs."""

    def __init__(self, root, mix, updates=40, epochs=2):
        self.root = str(root)
        self.recipe = make_recipe(mix, updates=updates, epochs=epochs)
        folder = make_run_root(self.root, self.recipe)
        self.index, self.order = build_stage_data(folder, self.recipe, "stage1")
        self.log = log_uri(self.root, "stage1")
        self.lines: list[str] = []

    def train(self, first: int, last: int, attempt: int = 1, hosts: int = 1, rows_of=None) -> None:
        """Updates first..last on some hosts, each reading `rows_of(host)` (strided by default)."""
        rows_of = rows_of or (lambda host: np.arange(host, 4, hosts))
        options = dict(first_step=first, last_step=last)
        loaders = [Loader(self.index, self.order, rows=rows_of(h), **options) for h in range(hosts)]
        for parts in zip(*loaders, strict=True):
            step = parts[0][0]
            ids = np.stack([ids for _, ids, _ in parts], axis=1).reshape(-1)
            tokens = np.stack([b.tokens for _, _, b in parts], axis=1)
            self.lines.append(Line(step, attempt, digest(ids), digest(tokens)).dump())
        for loader in loaders:
            loader.close()
        storage.write_text(self.log, "\n".join(self.lines) + "\n")


@pytest.fixture
def run(make_mix, tmp_path):
    return Run(tmp_path / "run", make_mix())


class TestWhere:
    def test_every_row_can_be_read_back(self, run):
        with Loader(run.index, run.order, last_step=30) as loader:
            for step, ids, batch in loader:
                seen = where(run.root, step)
                assert [s.instance for s in seen] == ids.tolist()
                assert [s.row for s in seen] == [0, 1, 2, 3]
                for s in seen:
                    tokens = np.fromfile(s.file, "<u2", s.tokens, offset=s.offset)
                    assert np.array_equal(tokens, batch.tokens[s.row])
                    assert f"/{s.label}/" in s.file
                assert {s.epoch for s in seen} == {1 if step <= 26 else 2}

    def test_one_row(self, run):
        assert where(run.root, 5, row=2) == where(run.root, 5)[2:3]

    @pytest.mark.parametrize(("step", "row"), [(0, None), (41, None), (1, 4), (1, -1)])
    def test_what_the_run_does_not_have(self, run, step, row):
        with pytest.raises(UserError, match=r"updates 1 to 40, not|rows 0 to 3, not"):
            where(run.root, step, row)

    def test_it_needs_no_data_and_little_time(self, run, make_mix):
        answer = where(run.root, 7)
        shutil.rmtree(run.recipe.stage1.data.base)
        assert where(run.root, 7) == answer
        program = (
            "import sys, time; begun = time.monotonic();"
            "from olmo_core_jax.data.where import where;"
            "where(sys.argv[1], 7); print(time.monotonic() - begun);"
            "assert 'jax' not in sys.modules"
        )
        took = subprocess.check_output([sys.executable, "-c", program, run.root], text=True)
        assert float(took) < 10  # far under a second on a machine that is not shared


class TestAudit:
    def test_an_unbroken_run(self, run):
        run.train(1, 40)
        (report,) = audit(run.root)
        assert report.ok, report.faults
        assert (report.updates, report.attempts, report.epochs) == (40, 1, 2)
        assert report.dropped_an_epoch == run.index.instances - 26 * 4
        assert sum(c.seen for c in report.labels.values()) >= 26 * 4
        assert {k: c.instances for k, c in report.labels.items()} == run.index.labels()

    def test_part_of_an_epoch_counts_labels(self, run):
        run.train(1, 10)
        (report,) = audit(run.root)
        seen = [run.index.place(int(i)).label for s in range(1, 11) for i in run.order.batch(s)]
        assert {k: c.seen for k, c in report.labels.items()} == {
            k: seen.count(k) for k in ("code", "web")
        }
        assert "10 updates in 1 attempt(s)" in report.lines()[0]

    def test_restarts_on_other_host_counts(self, run):
        run.train(1, 12, attempt=1, hosts=2)
        run.train(9, 30, attempt=2, hosts=4)
        run.train(30, 40, attempt=3, hosts=1)
        (report,) = audit(run.root)
        assert report.ok and report.repeated_updates == 5 and report.attempts == 3

    def test_double_sharding_fails(self, run):
        """Each host takes its share of what was already its share."""
        run.train(1, 40, hosts=2, rows_of=lambda host: np.arange(host, 4, 2)[[0, 0]])
        (report,) = audit(run.root)
        assert not report.ok
        assert (
            "40 updates were trained on other instances than the order's: 1, 2, 3, 4, 5, ..."
            in (report.faults[0])
        )
        assert report.lines()[-1].strip() == "FAILED"

    def test_hosts_that_all_read_the_same_rows_fail(self, run):
        run.train(1, 5, hosts=2, rows_of=lambda host: np.arange(0, 4, 2))
        assert not audit(run.root)[0].ok

    def test_a_resume_one_batch_off_fails(self, run):
        run.train(1, 10)
        kept = list(run.lines)
        run.lines.clear()
        run.train(10, 20)  # reads batch 10 again, as update 11
        shifted = [json.loads(line) for line in run.lines]
        run.lines = kept + [json.dumps(s | {"step": s["step"] + 1, "attempt": 2}) for s in shifted]
        storage.write_text(run.log, "\n".join(run.lines))
        (report,) = audit(run.root)
        assert report.faults == [
            "11 updates were trained on other instances than the order's: 11, 12, 13, 14, 15, ..."
        ]

    def test_a_gap_fails(self, run):
        run.train(1, 10)
        storage.write_text(run.log, "\n".join(run.lines[:4] + run.lines[6:]))
        assert audit(run.root)[0].faults == ["2 updates are not in the log: 5, 6"]

    def test_rows_in_another_order_fail(self, run):
        run.train(1, 5, rows_of=lambda host: np.array([1, 0, 2, 3]))
        assert not audit(run.root)[0].ok

    def test_a_torn_line_is_left_out(self, run):
        run.train(1, 10)
        storage.write_text(run.log, "\n".join(run.lines) + "\n" + run.lines[-1][:30])
        (report,) = audit(run.root)
        assert report.ok and report.torn_lines == 1

    def test_a_run_that_has_not_trained(self, run):
        assert audit(run.root) == []

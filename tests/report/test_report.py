"""The page and the cards, made of a run's files alone."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from synthetic import write_run

from olmo_core_jax.errors import UserError
from olmo_core_jax.report import html, tables
from olmo_core_jax.report.run import read_run


@pytest.fixture
def run_root(tmp_path):
    return str(write_run(tmp_path, steps=(60, 20)))


def edit(run_root, file, old, new):
    from pathlib import Path

    path = Path(run_root, file)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_page_needs_nothing_but_itself(run_root):
    with open(html.write(run_root)) as f:
        page = f.read()
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", page)
    assert "All 22 checks hold" in page
    for part in ("Stage 1", "Stage 2", "Landmarks", "Every check", "0.10.2", "limit 2e-5", "9e-7"):
        assert part in page
    charts = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(charts) == 10
    for chart in charts:
        ET.fromstring(chart)  # well-formed


def test_one_bad_update_turns_the_page_red(run_root):
    edit(
        run_root,
        "final_eval/result.json",
        '"stage1/batches that differ": 0',
        '"stage1/batches that differ": 1',
    )
    page = html.page(read_run(run_root))
    assert "1 of 22 checks fail" in page
    assert page.count('class="badge fail"') == 1


def test_a_run_that_died_has_a_report_too(tmp_path):
    root = write_run(tmp_path, steps=(60, 20), finished=False)
    for folder in ("stage2_train", "eval_landmarks/60", "warm_adam"):
        (root / folder / "result.json").unlink()
    (root / "stage2_train/metrics/metrics.jsonl").unlink()
    page = html.page(read_run(str(root)))
    assert "hold so far" in page and "All 22" not in page
    assert "Stage 1" in page and "Stage 2" not in page


def test_report_by_hand(run_root, tmp_path):
    from typer.testing import CliRunner

    from olmo_core_jax.cli import app

    done = CliRunner().invoke(app, ["report", run_root, "--output", str(tmp_path / "x.html")])
    assert done.exit_code == 0, done.output
    assert sum(line.startswith("pass") for line in done.output.splitlines()) == 22
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        read_run(str(tmp_path))


def test_text_of_a_recipe_cannot_become_markup(run_root):
    edit(run_root, "recipe.yaml", "Invented figures", "<script>alert(1)</script>")
    assert "<script>alert(1)" not in html.page(read_run(run_root))


def test_report_imports_no_framework():
    code = (
        "import sys, olmo_core_jax.report.html, olmo_core_jax.report.cards\n"
        "bad = {'jax', 'torch', 'orbax', 'flax', 'metaflow', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_as_people_read_them():
    assert [tables.number(v) for v in (0.0, 3.0, 1234567.0, 1.5e-7, 0.25, None)] == [
        "0", "3", "1,234,567", "1.5e-7", "0.25", "–",
    ]  # fmt: skip
    assert [tables.seconds(v) for v in (4.21, 185, 7620, 270000)] == [
        "4.2 s", "3 min 05 s", "2 h 07 min", "3 d 03 h",
    ]  # fmt: skip


def test_markdown_table_keeps_bars_inside_cells():
    table = tables.Table(["a|b", "n"], [["x|y", "1e-6"]])
    rows = table.markdown().splitlines()
    assert rows[0] == "| a\\|b | n |" and rows[1] == "| :--- | ---: |"
    assert rows[2].count(" | ") == 1

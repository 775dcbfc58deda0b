"""Text tables: aligned, whole whatever the terminal's width, and without markup."""

from olmo_core_jax.terminal import text_table


def test_columns_are_aligned_and_numbers_are_to_the_right():
    rows = [("a", 1, 2.5, None), ("bb", 12345, 3e-7, "x")]
    assert text_table(rows, ["name", "count", "value", ""]).splitlines() == [
        "name   count  value",
        "a          1    2.5  -",
        "bb    12,345  3e-07  x",
    ]
    assert text_table([]) == "" and text_table([], ["name"]) == "name"


def test_text_from_files_is_shown_as_it_is(monkeypatch):
    """No markup, no links, no colours, no line that is cut because a terminal is narrow."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    name = "[red]a[/red] :smile: /a/b " + "x" * 300
    assert text_table([(name, 1)]) == f"{name}  1"

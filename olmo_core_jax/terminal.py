"""Tables for terminals and logs, drawn by rich."""

import io
from collections.abc import Sequence
from typing import Any

WIDTH = 10_000
"""Columns that a line may take: a table in a log or a pipe is never wrapped or cut."""


def text_table(rows: Sequence[Sequence[Any]], header: Sequence[str] | None = None) -> str:
    """Aligned columns as text without a trailing newline; a column of numbers only is aligned right.

    Integers get thousands separators, floats six digits; None is `-`. Text is shown as it is, without markup.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=header is not None, pad_edge=False)
    for k in range(len(header or (rows and rows[0]))):
        numbers = rows and all(isinstance(row[k], int | float | None) for row in rows)
        table.add_column(
            Text(header[k]) if header else "", justify="right" if numbers else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)

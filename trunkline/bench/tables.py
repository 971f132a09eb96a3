"""Rows of cells as a table that reads well in a terminal and in a Markdown page."""

from collections.abc import Sequence

NONE = "–"  # in place of a number that there is none of


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)

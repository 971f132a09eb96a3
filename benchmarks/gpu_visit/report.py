"""Rows of a visit, and how they are written down. Knows neither torch nor GPUs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trunkline.bench.tables import align

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that was checked or measured.

    part, what  where it stands, e.g. "decode", "64 × 4096"
    value       in `unit`; None: it is not known, and `note` says why
    share       of something measured in the same visit, which `of` names: 0.91, "the copy"
    goal        a sentence, "" if there is none; `met` says whether it was reached, None if that can't be said
    failed      it went wrong, as `note` says
    """

    part: str
    what: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    of: str = ""
    goal: str = ""
    met: bool | None = None
    note: str = ""
    failed: bool = False


def to_json(facts: dict[str, Any], rows: Iterable[Row], *, rehearsal: bool) -> str:
    """Everything; of a rehearsal, the numbers stand under another name, so that nothing takes them for results."""
    listed = [asdict(row) for row in rows]
    if rehearsal:
        for row in listed:
            row["rehearsed"] = {name: row.pop(name) for name in ("value", "share", "met", "note")}
    return json.dumps({"rehearsal": rehearsal, "facts": facts, "rows": listed}, indent=1, ensure_ascii=False) + "\n"


def to_markdown(facts: dict[str, Any], rows: Sequence[Row], *, rehearsal: bool) -> str:
    """A page with one table a part."""
    title = "# Rehearsal on a CPU: no number here is a result" if rehearsal else "# A GPU visit"
    lines = [title, "", *(f"- {name}: {value}" for name, value in facts.items())]
    for part in dict.fromkeys(row.part for row in rows):
        cells = [_cells(row, rehearsal) for row in rows if row.part == part]
        lines += ["", f"## {part}", "", align([("what", "measured", "goal", "met", "note"), *cells])]
    return "\n".join(lines) + "\n"


def _cells(row: Row, rehearsal: bool) -> tuple[str, ...]:
    met = "" if not row.goal else "–" if row.met is None or rehearsal else "yes" if row.met else "no"
    note = "" if rehearsal and row.value is not None and not row.failed else row.note
    return row.what, _measured(row, rehearsal), row.goal, met, note.replace("|", "/").replace("\n", " ")


def _measured(row: Row, rehearsal: bool) -> str:
    if row.failed:
        return "failed"
    if row.value is None:
        return NOT_MEASURED
    if rehearsal:
        return "rehearsed"
    share = f" ({row.share:.0%} of {row.of})" if row.share is not None else ""
    return f"{_number(row.value)} {row.unit}".strip() + share


def _number(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def read_rows(file: Path) -> list[Row]:
    """What a part has written until now, a row a line; half a line at the end, of one that was killed, is left out."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]

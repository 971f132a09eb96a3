"""Files of JSON lines, as the corpora come."""

import json
from pathlib import Path
from typing import Any


def read_rows(file: Path) -> list[Any]:
    """The values of all lines. Only a line feed ends one: `str.splitlines` would cut at a U+2028 within a text."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]

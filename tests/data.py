"""Traces and corpora that are too large for the repository. Tests that need them are skipped where they aren't.

The folder is $TRUNKLINE_DATA, or ../shared/data beside the checkout.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.json_lines import read_rows


def data_file(name: str) -> Path:
    """The path of e.g. "traces/conversation_trace.jsonl"; skips the test that asks if it isn't there."""
    root = Path(os.environ.get("TRUNKLINE_DATA") or Path(__file__).resolve().parents[1] / ".." / "shared" / "data")
    path = (root / name).resolve()
    if not path.is_file():
        pytest.skip(f"{path} is not here: set TRUNKLINE_DATA to the folder that has {name}")
    return path


def grammar_rows(name: str) -> list[Any]:
    """The rows of e.g. "keyword_probes", a corpus of schemas, functions or calls; skips as `data_file` does."""
    return read_rows(data_file(f"grammar/{name}.jsonl"))

"""Batches of requests for tests: their lines, their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Write = Callable[..., Path]


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = body or {"prompt": custom_id, "max_tokens": 4, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_lines(folder: Path, *lines: Any, name: str = "in.jsonl") -> Path:
    """Objects become JSON, text stays as it is."""
    path = folder / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in lines))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()]

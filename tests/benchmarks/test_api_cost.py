"""The benchmark of the API process: a smoke run on the tiny model, and its table. The numbers are not judged here."""

from pathlib import Path

import pytest

from benchmarks.api_cost import CASES, Case, Measured, figures, main, table, verdicts
from tests.tiny import tiny_model

STREAM, REQUEST = CASES[0], next(case for case in CASES if case.title == "not streamed, 1 token")


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every stream has all its events, or it raises."""
    model, page = tiny_model(tmp_path / "tiny"), tmp_path / "page.md"
    flags = ["--model", str(model), "--rounds", "1", "--requests", "9", "--only", "1 token", "--output", str(page)]
    assert main(flags) == 0
    text = page.read_text()
    assert text in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == [case.title for case in CASES if case.max_tokens == 1]
    assert all(float(row[1].split()[0]) > 0 for row in rows[2:])


def test_costs_are_divided_by_tokens_or_requests() -> None:
    assert figures(STREAM, [Measured(1.0, 5.0, 1, 1)]) == ([1e6 / (64 * 256)], [64 / 5])
    assert figures(REQUEST, [Measured(1.0, 2.0, 0, 0)]) == ([1e6 / 1000], [500])


def test_medians_and_goals() -> None:
    def rounds(case: Case, *seconds: float) -> list[Measured]:
        return [Measured(each, 2 * each, 200, 100) for each in seconds]

    results = {STREAM: rounds(STREAM, 0.9, 5.0, 0.8), REQUEST: rounds(REQUEST, 0.9, 0.9, 0.9)}
    stream, request = table(results).splitlines()[2:]
    assert "| 55 a token " in stream and "| 55 305 49 " in stream and stream.endswith("| 2.00           |")
    assert "| 900 a request " in request and "| 556 " in request
    assert verdicts(results) == [
        "- 64 streams of 256 tokens: 55 µs, met (≤ 60).",
        "- not streamed, 1 token: 900 µs, not met (≤ 700).",
        "- not streamed, 1 token: 556 requests/s, not met (≥ 600).",
    ]

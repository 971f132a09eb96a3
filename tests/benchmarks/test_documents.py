"""The benchmark of order-free documents: its workload, and a smoke run with the real model. The numbers are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.documents import NUM_DOCUMENTS, TOP, make_questions, table

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.real
def test_the_workload_is_five_of_sixteen_popular_ones_more_often() -> None:
    questions = make_questions(60, seed=0)
    assert questions == make_questions(60, seed=0) != make_questions(60, seed=1)
    titles = [[document["title"] for document in question.documents] for question in questions]
    assert all(len(set(found)) == TOP for found in titles)
    counts = sorted((sum(title in found for found in titles) for title in set().union(*titles)), reverse=True)
    assert len(counts) == NUM_DOCUMENTS
    assert counts[0] > 3 * counts[-1]
    assert len({frozenset(found) for found in titles}) < len({tuple(found) for found in titles}), (
        "sets come again, orders rarely"
    )


@pytest.mark.real
@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "benchmarks.documents", "--requests", "2", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert (result["requests"], result["checked"], result["different"]) == (2, 1, 0)
    assert table(result) in done.stdout

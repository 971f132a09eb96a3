"""The benchmark of following a schema: a smoke run with the real model. Its steps are judged, its times are not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.constrained import ONE_BY_ONE, TOGETHER, read_cases, tables
from tests.data import data_file

ROOT = Path(__file__).resolve().parents[2]


def test_cases_are_from_all_over_the_sample(tmp_path: Path) -> None:
    (tmp_path / "bfcl_sample.jsonl").write_text("".join(f"{number}\n" for number in range(7)), encoding="utf-8")
    assert read_cases(tmp_path, 3) == [0, 2, 4]
    assert read_cases(tmp_path, 5) == [0, 1, 2, 3, 4]
    assert read_cases(tmp_path, 99) == list(range(7))


@pytest.mark.real
@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    data = data_file("grammar/bfcl_sample.jsonl").parent
    output = tmp_path / "numbers.json"
    flags = ("--data", str(data), "--pairs", "1", "--cases", "6", "--output", str(output))
    command = [sys.executable, "-m", "benchmarks.constrained", *flags]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())["results"]
    assert set(results["masks"]) == set(results["calls"]) == {ONE_BY_ONE, TOGETHER}
    assert results["same_texts"] is True
    assert results["calls"][TOGETHER]["calls"] == 6
    assert results["calls"][TOGETHER]["tokens"] == results["calls"][ONE_BY_ONE]["tokens"]
    assert results["calls"][TOGETHER]["steps_ratio"] <= 0.8
    assert tables(results) in done.stdout

"""`make loadtest`, cut short: it ends after so many answers, and so asks the same of a fast machine and a slow one."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.environment import ROOT

KINDS = {"chat", "json", "rag", "tools"}
SECONDS = 600  # only for what would otherwise hang


@pytest.mark.real
def test_the_mix_on_the_built_in_model(tmp_path: Path) -> None:
    files = ("--csv", str(tmp_path / "run"), "--html", str(tmp_path / "run.html"))
    short = ("--answers", "60", "--run-time", f"{SECONDS - 60}s", "--applications", "1", "--max-tokens", "16")
    command = [sys.executable, "-m", "loadtests", *short, *files]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "run_stats.csv").open(newline="") as file:
        rows = {(row["Name"], row["Type"]): row for row in csv.DictReader(file)}
    assert {name for name, row in rows if row == "TTFT ms"} == KINDS
    assert sum(int(row["Failure Count"]) for row in rows.values()) == 0
    assert {float(rows[kind, "valid %"]["Average Response Time"]) for kind in ("json", "tools")} == {100}
    prompt, cached = (float(rows["rag", row]["Average Response Time"]) for row in ("prompt", "cached"))
    assert cached / prompt >= 0.8
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert '<section id="trunkline"' in page and page.count("<polyline") == 2 * len(KINDS)

"""The benchmarks' smoke run: the programs behind the tables work, with the real model. The numbers are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server import serve
from tests.data import data_file
from trunkline.bench.cli import make_texts
from trunkline.bench.workloads import NAMES, make_workloads

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.real


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_workloads(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    printed = run("benchmarks.workloads", "--workload", "W1", "W5", "--output", str(output))
    alone, cold = json.loads(output.read_text())["workloads"]
    assert alone["failures"] == cold["failures"] == 0, printed
    assert alone["output_tokens"] == 3 * 128 and alone["prompt_tokens"] == 3 * 128
    assert cold["output_tokens"] == 16 * 64 and cold["prompt_tokens"] == 16 * 512 and cold["cached_tokens"] == 0


def test_against_transformers(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    flags = ("--workload", "W1", "--requests", "1", "--output", str(output))
    assert "×" in run("benchmarks.against_transformers", *flags)
    (result,) = json.loads(output.read_text())["results"]
    assert result["transformers"]["requests"] == 1 and result["trunkline"]["succeeded"] == 3


def test_drafts(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    assert "asked again" in run("benchmarks.drafts", "--pairs", "1", "--output", str(output))
    results = json.loads(output.read_text())["results"]
    assert [one["streams"] for one in results["cold"]] == [1, 8]
    assert all(one["steps_ratio"] <= 0.5 for one in results["repeated"]), results["repeated"]


def test_tool_calls() -> None:
    data = data_file("grammar/bfcl_sample.jsonl").parent
    assert "| named " in run("benchmarks.tool_calls", "--data", str(data), "--cases", "2")


def test_lengths_are_exact_for_the_built_in_tokenizer() -> None:
    texts = make_texts(None)
    for name in NAMES:
        for workload in make_workloads(name, texts, 0):
            for turn in (turn for session in workload.sessions for turn in session):
                contents = [message["content"] for message in turn.messages] if turn.prompt is None else [turn.prompt]
                assert sum(texts.count(content) for content in contents) == turn.prompt_tokens


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no-such-model"), serve("no-such-model"):
        pass

"""The Locust file, run as a user runs it, for a few seconds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server import serve
from tests.bench.fake_server import FakeServer
from tests.tiny import tiny_model

LOCUSTFILE = Path(__file__).resolve().parents[2] / "loadtests" / "locustfile.py"

pytestmark = pytest.mark.slow


def locust(url: str, *flags: str, seconds: int = 3) -> subprocess.CompletedProcess[str]:
    shape = ("--users", "4", "--spawn-rate", "4", "--run-time", f"{seconds}s", "--stop-timeout", "30")
    return subprocess.run(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", url, *shape, *flags],
        check=False,  # the exit code is what is tested
        cwd=LOCUSTFILE.parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_reports_times_and_cached_tokens() -> None:
    with FakeServer() as server:
        done = locust(server.url, "--max-tokens", "8", "--applications", "2")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert re.search(r"stream +TTFT +\d+ +0\(0\.00%\)", output)
    assert re.search(r"stream +answer +\d+ +0\(0\.00%\)", output)
    chats = [body for path, body in server.requests if path == "/v1/chat/completions"]
    assert f"{16 * len(chats):,} of them cached" in done.stdout
    assert f"{8 * len(chats):,} output tokens" in done.stdout
    assert len({body["messages"][0]["content"] for body in chats}) == 2  # one system prompt for each application
    assert all(body["stream"] and body["max_tokens"] == 8 for body in chats)


def test_failures_fail_the_run() -> None:
    with FakeServer(breaks=lambda body: "error") as server:
        done = locust(server.url, seconds=2)
    assert done.returncode == 1
    assert "the engine is gone" in done.stdout + done.stderr


def test_against_our_own_server(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=8192)
    with serve(str(model), "--kv-cache-memory", "64MiB") as url:
        done = locust(url, "--max-tokens", "8", "--applications", "1")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    counts = re.search(r"([\d,]+) prompt tokens, ([\d,]+) of them cached", done.stdout)
    assert counts is not None, output
    prompt, cached = (int(number.replace(",", "")) for number in counts.groups())
    assert 0 < cached < prompt

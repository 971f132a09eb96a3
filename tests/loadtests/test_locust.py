"""The Locust file, run as a user runs it, for a few answers. Locust is never imported here: it would patch the tests' sockets."""

import csv
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server import serve
from tests.bench.fake_server import FakeServer
from tests.tiny import tiny_model

LOCUSTFILE = Path(__file__).resolve().parents[2] / "loadtests" / "locustfile.py"
USERS = 4
SECONDS = 120  # only for what would otherwise hang

pytestmark = pytest.mark.slow


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", *flags]


def locust(url: str, *flags: str, answers: int = 8) -> tuple[int, str]:
    """Exit code and output of a run that ends once there are `answers`."""
    shape = (
        "--users",
        str(USERS),
        "--spawn-rate",
        str(USERS),
        "--run-time",
        "60s",
        "--stop-timeout",
        "30",
        "--answers",
        str(answers),
    )
    done = subprocess.run(
        command("--host", url, *shape, *flags),
        check=False,  # the exit code is what is tested
        cwd=LOCUSTFILE.parent.parent,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


def table(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Locust's CSV, by name and type."""
    with path.open(newline="") as file:
        return {(row["Name"], row["Type"]): row for row in csv.DictReader(file)}


def test_rows_of_table_csv_and_report(tmp_path: Path) -> None:
    files = ("--csv", str(tmp_path / "run"), "--html", str(tmp_path / "run.html"))
    with FakeServer() as server:
        code, output = locust(server.url, "--max-tokens", "8", "--applications", "2", *files, "RagUser")
    assert code == 0, output
    assert re.search(r"TTFT ms +rag +\d+ +0\(0\.00%\)", output)
    chats = [body for path, body in server.requests if path == "/v1/chat/completions"]
    assert len({body["messages"][0]["content"] for body in chats}) == 2  # one system prompt for each application
    assert all(body["stream"] and body["max_tokens"] == 8 for body in chats)

    rows = table(tmp_path / "run_stats.csv")
    counts = [int(rows["rag", row]["Request Count"]) for row in ("POST", "TTFT ms", "TPOT ms", "cached %", "cached")]
    answers = int(re.search(r"\n +rag +(\d+)", output)[1])  # type: ignore[index]
    assert answers <= len(chats) <= answers + USERS  # what was under way when the run ended
    assert len(set(counts)) == 1 and 0 <= answers - counts[0] <= USERS  # Locust may write its file just before the last
    assert f"{16 * answers:,} of them cached" in output
    assert f"{8 * answers:,} output tokens" in output
    assert float(rows["rag", "cached"]["Average Response Time"]) == 16
    models = int(rows["/v1/models", "GET"]["Request Count"])
    assert int(rows["Aggregated", ""]["Request Count"]) == counts[0] + models  # measures are no requests

    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert '"TTFT ms"' in page  # a row of Locust's own
    added = page[page.index('<section id="trunkline"') :]
    assert added.count("<svg") == 2 and f"<td>rag</td><td>{answers}</td><td>0</td>" in added
    assert added.rstrip().endswith("</html>")


def test_failures_fail_the_run() -> None:
    with FakeServer(breaks=lambda body: "error") as server:
        code, output = locust(server.url, "--run-time", "2s", "RagUser")
    assert code == 1
    assert "the engine is gone" in output


def test_an_answer_that_breaks_its_schema_is_a_failure(tmp_path: Path) -> None:
    with FakeServer(answer='{"team": "sales"}') as server:
        code, output = locust(server.url, "--csv", str(tmp_path / "run"), "SchemaUser")
    assert code == 1
    assert "breaks its schema" in output
    rows = table(tmp_path / "run_stats.csv")
    assert rows["json", "POST"]["Failure Count"] == rows["json", "POST"]["Request Count"]
    assert float(rows["json", "valid %"]["Average Response Time"]) == 0


def test_a_tool_that_is_not_called_is_a_failure() -> None:
    with FakeServer() as server:
        code, output = locust(server.url, "ToolUser")
    assert code == 1
    assert "0 calls, not one" in output


def test_too_little_cached_fails_the_run() -> None:
    with FakeServer() as server:
        code, output = locust(server.url, "--min-cached-ratio", "0.9", "RagUser")
        assert code == 1 and "less than --min-cached-ratio 0.9" in output
        assert locust(server.url, "--min-cached-ratio", "0.001", "RagUser")[0] == 0


def test_workers_report_to_the_master(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    shape = ("--users", "4", "--spawn-rate", "4", "--run-time", "60s", "--stop-timeout", "30", "--answers", "20")
    at = ("--master-host", "127.0.0.1", "--master-port", port)
    with FakeServer() as server:
        lead = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2")
        files = ("--csv", str(tmp_path / "run"), "--html", str(tmp_path / "run.html"))
        commands = [
            command(*lead, "--host", server.url, *shape, "--max-tokens", "8", *files, "RagUser"),
            *(command("--worker", *at, "RagUser") for _ in range(2)),
        ]
        running = [
            subprocess.Popen(
                one, cwd=LOCUSTFILE.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for one in commands
        ]
        try:
            outputs = [process.communicate(timeout=SECONDS)[0] for process in running]
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    chats = [body for path, body in server.requests if path == "/v1/chat/completions"]
    answers = int(table(tmp_path / "run_stats.csv")["rag", "TTFT ms"]["Request Count"])
    assert answers <= len(chats) <= answers + USERS  # what was under way when the run ended
    assert f"{16 * answers:,} of them cached" in outputs[0]
    assert "of them cached" not in outputs[1] + outputs[2]
    asked = [body["messages"][-1]["content"] for body in chats]
    assert len(set(asked)) == len(asked)  # the users of two workers are not the same people


def test_against_our_own_server(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=8192)
    with serve(str(model), "--kv-cache-memory", "64MiB") as url:
        code, output = locust(url, "--max-tokens", "8", "--applications", "1", "--min-cached-ratio", "0.01", answers=24)
    assert code == 0, output
    lines = dict(re.findall(r"^ *(chat|json|rag|tools) (.*)$", output, flags=re.MULTILINE))
    assert lines["json"].endswith("100.0 %") and lines["tools"].endswith("100.0 %")

"""`trunkline run-batch`: its files, a live server, and whatever cuts it off."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.api.serving import MODEL, Server, wait_idle
from tests.test_cli import fails
from tests.tiny import tiny_model
from trunkline.batch_files import OutputFailed, Request, Result, Results, read_requests
from trunkline.batch_run import Tally
from trunkline.cli import main
from trunkline.errors import ConfigError

Write = Callable[..., Path]


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = body or {"prompt": custom_id, "max_tokens": 4, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*lines: Any, name: str = "in.jsonl") -> Path:
        """Objects become JSON, text stays as it is."""
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in lines))
        return path

    return write


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()]


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "Line 2 is not JSON: "),
        ("[" * 100_000, "Line 2 is not JSON: it is nested too deeply."),
        ("[1]", "Line 2 is [1]; allowed is a JSON object."),
        ({"method": "POST"}, "Line 2: custom_id is null; allowed is a text."),
        ({**line("b"), "custom_id": 7}, "Line 2: custom_id is 7"),
        ({**line("b"), "method": "GET"}, "Line 2: method is 'GET'; allowed is 'POST'."),
        ({**line("b"), "url": "/v1/images"}, "Line 2: url is '/v1/images'; allowed is one of /v1/chat/completions, "),
        ({**line("b"), "body": "x"}, "Line 2: body is 'x'; allowed is a JSON object."),
        (line("b", stream=True, prompt="x"), "Line 2: stream is true; in a batch answers come whole"),
    ],
)
def test_a_line_that_is_no_request_says_why(write: Write, bad: Any, words: str) -> None:
    good, refused, last = read_requests(write(line("a"), bad, "", line("c")))
    assert (good.problem, last.problem, last.line) == (None, None, 4)
    assert refused.problem is not None and words in refused.problem, refused.problem
    assert refused.key in (2, "b")


def test_what_no_batch_can_be_made_of(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lines 1 and 3 have the same custom_id, 'a'; give each its own"):
        read_requests(write(line("a"), line("b"), line("a")))
    with pytest.raises(ConfigError, match="holds no request"):
        read_requests(write("", "  "))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_requests(tmp_path / "none.jsonl")


REQUESTS = [Request(number, name, "/v1/completions", {}) for number, name in enumerate("abc", start=1)]


def test_results_come_in_the_order_of_requests_whenever_they_came(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, REQUESTS) as results:
        for at in (2, 0):
            results.add(REQUESTS[at], Result(200, f"r{at}", {"text": "é\ud800"}))
    with Results(path, REQUESTS) as results:
        assert [request.custom_id for request in results.missing()] == ["b"]
        results.add(REQUESTS[1], Result(error={"code": "no_answer", "message": "m", "line": 2}))
        results.finish()
        assert (results.num_done, results.num_succeeded) == (3, 2)
    found = rows(path)
    assert [row["custom_id"] for row in found] == ["a", "b", "c"]
    assert found[0]["response"] == {"status_code": 200, "request_id": "r0", "body": {"text": "é\ud800"}}
    assert found[0]["error"] is None
    assert (found[1]["response"], found[1]["error"]["line"]) == (None, 2)
    assert len({row["id"] for row in found}) == 3 and found[0]["id"].startswith("batch_req_")


def test_a_last_line_that_was_cut_is_taken_away_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, REQUESTS) as results:
        for request in REQUESTS[:2]:
            results.add(request, Result(200, "r", {}))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        with Results(path, REQUESTS) as results:
            assert [request.custom_id for request in results.missing()] == ["b", "c"], end
        assert path.read_bytes() == whole[:first]
    path.write_bytes(whole[:-1])  # nothing but its end is missing
    with Results(path, REQUESTS) as results:
        assert path.read_bytes() == whole
        assert [request.custom_id for request in results.missing()] == ["c"]
        results.add(REQUESTS[2], Result(200, "r", {}))
    assert path.read_bytes().startswith(whole) and len(rows(path)) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("my diary\n", "line 1 is no result of a batch, so nothing is written there"),
        ("my diary", "line 1 is no result of a batch"),
        (
            '{"id": "batch_req_1", "custom_id": "z", "response": {"status_code": 200}, "error": null}\n',
            "is the result of 'z'",
        ),
        ('{"id": "else", "custom_id": "a", "response": {"status_code": 200}, "error": null}\n', "is no result"),
        ('{"id": "batch_req_1"}\n', "is no result"),
        (
            '{"id": "batch_req_1", "custom_id": "z", "response": {"status_code": 200}, "error": null}',
            "is the result of 'z'",
        ),
        (
            '{"id": "batch_req_1", "custom_id": ["a"], "response": {"status_code": 200}, "error": null}\n',
            "is no result",
        ),
        ("[" * 100_000, "is no result"),
    ],
)
def test_a_file_of_somebody_else_stays_as_it_is(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        Results(path, REQUESTS)
    assert path.read_text() == content


def test_two_batches_do_not_write_the_same_file(tmp_path: Path) -> None:
    with Results(tmp_path / "out.jsonl", REQUESTS), pytest.raises(ConfigError, match="Another batch is writing"):
        Results(tmp_path / "out.jsonl", REQUESTS)
    with pytest.raises(ConfigError, match="which cannot be written: No such file or directory"):
        Results(tmp_path / "no" / "out.jsonl", REQUESTS)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_is_no_place_for_results(device: str) -> None:
    """It would be replaced by a file, or read without end."""
    with pytest.raises(ConfigError, match="no regular file"):
        Results(device, REQUESTS)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link.jsonl", tmp_path / "target.jsonl"
    link.symlink_to(target)
    with Results(link, REQUESTS) as results:
        for request in reversed(REQUESTS):
            results.add(request, Result(200, "r", {}))
        results.finish()
    assert link.is_symlink()
    assert [row["custom_id"] for row in rows(target)] == ["a", "b", "c"]


def test_a_full_disk_ends_the_batch_in_one_sentence(write: Write, moody: Any, tmp_path: Path) -> None:
    """The limit of a file's size stands for the disk's."""
    url, _ = moody()
    source, target = write(*(line(f"r{number}") for number in range(30))), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "trunkline", "run-batch", "-i", str(source), "-o", str(target), "--base-url", url]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    cut = subprocess.run(command, check=False, preexec_fn=limit, capture_output=True, text=True)
    assert cut.returncode == 1
    assert (
        "Traceback" not in cut.stderr
        and f"error: {target} cannot be written: File too large. What is in it" in cut.stderr
    )
    num_kept = target.read_bytes().count(b"\n")
    assert 0 < num_kept < 30
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"{num_kept} of 30 results are in {target} already." in again.stderr
    assert [row["custom_id"] for row in rows(target)] == [f"r{number}" for number in range(30)]


def test_there_is_no_room_for_the_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.ordered").mkdir()
    with Results(path, REQUESTS) as results:
        for request in reversed(REQUESTS):
            results.add(request, Result(200, "r", {}))
        with pytest.raises(OutputFailed, match="cannot be written: Is a directory"):
            results.finish()
    assert len(rows(path)) == 3


def test_failed_results_can_be_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, REQUESTS) as results:
        results.add(REQUESTS[0], Result(200, "r", {}))
        results.add(REQUESTS[1], Result(500, "r", {}))
    with Results(path, REQUESTS, retry_failed=True) as results:
        assert [request.custom_id for request in results.missing()] == ["b", "c"]
        results.add(REQUESTS[1], Result(200, "again", {}))
    with Results(path, REQUESTS) as results:  # as after a crash: of two results of b the later counts
        results.finish()
        assert (results.num_done, results.num_succeeded) == (2, 2)
    assert [(row["custom_id"], row["response"]["request_id"]) for row in rows(path)] == [("a", "r"), ("b", "again")]


# ---------------------------------------------------------------- a server that misbehaves


class Moody(BaseHTTPRequestHandler):
    """Takes the next of `moods` for each request: a status, or "hang up". Then it answers 200."""

    moods: ClassVar[list[Any]]
    asked: ClassVar[list[bytes]]
    models: ClassVar[int] = 200  # the status of /v1/models from the second time on
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200 if not self.asked else self.models, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.asked.append(self.rfile.read(int(self.headers["content-length"])))
        mood = self.moods.pop(0) if self.moods else 200
        if mood == "hang up":
            self.close_connection = True
            return
        if mood == "engine_dead":
            self._send(500, b'{"error": {"code": "engine_dead"}}')
            return
        self._send(mood, b'{"usage": {"prompt_tokens": 4, "completion_tokens": 2}}' if mood == 200 else b"busy")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def moody() -> Iterator[Callable[..., tuple[str, list[bytes]]]]:
    stops: list[Callable[[], None]] = []

    def start(*moods: Any, models: int = 200) -> tuple[str, list[bytes]]:
        asked: list[bytes] = []
        handler = type("Handler", (Moody,), {"moods": list(moods), "asked": asked, "models": models})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stops.extend((server.shutdown, thread.join, server.server_close))
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for stop in stops:
        stop()


def batch(source: Path, url: str, *flags: str) -> tuple[int, Path]:
    out = source.with_name("out.jsonl")
    return main(["run-batch", "-i", str(source), "-o", str(out), "--base-url", url, *flags]), out


def test_a_full_server_is_asked_again(write: Write, moody: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, asked = moody(429, 503, 200)
    code, out = batch(write(line("a")), url)
    assert (code, len(asked)) == (0, 3)
    assert rows(out)[0]["response"]["status_code"] == 200
    assert "1 succeeded, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "body", [None, [], {"usage": "all"}, {"usage": {"prompt_tokens": "5", "prompt_tokens_details": [1]}}]
)
def test_numbers_that_are_none_are_not_counted(body: Any) -> None:
    tally = Tally()
    tally.add({"usage": {"input_tokens": 5, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 2}}})
    tally.add(body)
    assert tally == Tally(prompt_tokens=5, cached_tokens=2, output_tokens=3)


def test_in_the_end_the_answer_is_what_it_is(write: Write, moody: Any) -> None:
    url, asked = moody(429, 429)
    code, out = batch(write(line("a")), url, "--max-retries", "1")
    assert (code, len(asked)) == (1, 2), "not one request of it succeeded"
    assert rows(out)[0]["response"] == {"status_code": 429, "request_id": "", "body": "busy"}


def test_no_answer_is_an_error_of_one_line(write: Write, moody: Any) -> None:
    url, _ = moody("hang up")
    code, out = batch(write(line("a"), line("b")), url, "--max-retries", "0", "--concurrency", "1")
    first, second = rows(out)
    assert (code, first["response"], first["error"]["code"], first["error"]["line"]) == (0, None, "no_answer", 1)
    assert second["response"]["status_code"] == 200


@pytest.mark.parametrize("mood", ["hang up", "engine_dead"])
def test_without_a_server_the_batch_ends_and_can_go_on(
    write: Write, moody: Any, capsys: pytest.CaptureFixture[str], mood: str
) -> None:
    url, _ = moody(200, mood, models=500)
    source = write(line("a"), line("b"), line("c"))
    code, out = batch(source, url, "--max-retries", "0", "--concurrency", "1")
    assert code == 1
    assert "is gone" in (told := capsys.readouterr().err) and "run the same command again" in told
    assert [row["custom_id"] for row in rows(out)] == ["a"], "what nobody answered is not failed"
    url, asked = moody()
    code, out = batch(source, url)
    assert (code, len(asked)) == (0, 2)
    assert [row["custom_id"] for row in rows(out)] == ["a", "b", "c"]


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--base-url", "http://x", "--model", "m"], 1, "leave one of them out"),
        (["--timeout", "0"], 1, "--timeout is 0"),
        (["--timeout", "nan"], 1, "--timeout is nan"),
        (["--concurrency", "0"], 2, "--concurrency is '0'; allowed is an integer of at least 1."),
        (["--concurency", "2"], 2, "unknown argument --concurency; did you mean --concurrency?"),
        (["--model", "m", "--max-num-seq", "2"], 2, "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (["--model", "/does/not/exist"], 1, "/does/not/exist"),
        (["--base-url", "http://127.0.0.1:9"], 1, "is a server running there?"),
    ],
)
def test_flags_that_make_no_sense(
    write: Write, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, words: str
) -> None:
    source = write(line("a"))
    seen, told = fails(capsys, "run-batch", "-i", str(source), "-o", str(source.with_name("out.jsonl")), *flags)
    assert (seen, words in told) == (code, True), told


def test_the_input_is_never_the_output(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(line("a"))
    assert fails(capsys, "run-batch", "-i", str(source), "-o", str(source))[0] == 1
    assert rows(source) == [line("a")]


# ---------------------------------------------------------------- a live server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with Server(tiny, "--served-model-name", MODEL, "--kv-cache-memory", "16MiB") as server:
        yield server.wait_ready()


@pytest.mark.slow
def test_every_route_against_a_live_server(write: Write, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    source = write(
        line("chat", "/v1/chat/completions", messages=messages, max_tokens=4),
        line("text"),
        "broken",
        line("response", "/v1/responses", input="Hello", max_output_tokens=4),
        line("vector", "/v1/embeddings", input="Hello"),
        line("refused", max_tokens=-1, prompt="x"),
        line("elsewhere", model="another", prompt="x"),
    )
    code, out = batch(source, server.url + "/v1")
    found = {row["custom_id"]: row for row in rows(out)}
    assert code == 0
    assert list(found) == ["chat", "text", None, "response", "vector", "refused", "elsewhere"]
    status = {name: row["response"] and row["response"]["status_code"] for name, row in found.items()}
    assert status == {
        "chat": 200,
        "text": 200,
        None: None,
        "response": 200,
        "vector": 200,
        "refused": 400,
        "elsewhere": 404,
    }
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert found["text"]["response"]["request_id"]
    assert found["refused"]["response"]["body"]["error"]["param"] == "max_tokens" and found["refused"]["error"] is None
    assert found[None]["error"]["line"] == 3
    assert "4 succeeded, 3 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_and_run_again_it_gives_the_same(write: Write, server: Server, tmp_path: Path) -> None:
    source = write(
        *(line(f"r{i}", prompt=f"Once upon {i}", max_tokens=24, temperature=0, ignore_eos=True) for i in range(40))
    )
    killed = tmp_path / "killed.jsonl"
    command = [sys.executable, "-m", "trunkline", "run-batch", "-i", str(source), "-o", str(killed)]
    command += ["--base-url", server.url, "--concurrency", "3"]
    for enough in (3, 12):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while not killed.exists() or killed.read_bytes().count(b"\n") < enough:
            assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
        done = killed.read_bytes().count(b"\n")
        assert enough <= done < 40, "it was killed in the middle"
    with killed.open("ab") as file:
        file.write(b'{"id": "batch_req_0", "custom_id": "r39", "resp')  # as if it had been killed while it wrote
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert f"{done} of 40 results are in" in ended.stderr
    assert "40 succeeded, 0 failed" in ended.stdout

    _, whole = batch(source, server.url)
    texts = [
        [(row["custom_id"], row["response"]["body"]["choices"][0]["text"]) for row in rows(path)]
        for path in (killed, whole)
    ]
    assert texts[0] == texts[1] and [name for name, _ in texts[0]] == [f"r{i}" for i in range(40)]
    wait_idle(server.url)


@pytest.mark.slow
def test_with_an_engine_of_its_own_ctrl_c_ends_all_of_it(write: Write, tiny: Path, tmp_path: Path) -> None:
    source = write(*(line(f"r{i}", prompt=f"{i}", max_tokens=64, temperature=0, ignore_eos=True) for i in range(400)))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "trunkline", "run-batch", "-i", str(source), "-o", str(out), "--model", str(tiny)]
    command += ["--kv-cache-memory", "16MiB", "--threads", "1", "--concurrency", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of it
    told, _ = process.communicate(timeout=60)  # which would hang if the engine still had our pipe
    assert process.returncode == 130, told
    assert "of 400 results are in" in told and "run the same command again to go on" in told and "Traceback" not in told

    short = write(*(line(f"r{i}", prompt=f"{i}") for i in range(3)), name="short.jsonl")
    ended = subprocess.run(
        [*command[:5], str(short), "-o", str(tmp_path / "short.out.jsonl"), *command[8:]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "3 succeeded, 0 failed" in ended.stdout, ended

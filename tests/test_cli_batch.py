"""`trunkline run-batch`: a live server, and whatever cuts it off."""

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.api.serving import MODEL, Server, wait_idle
from tests.batches import Write, line, rows, write_lines
from tests.plain_server import PlainHandler
from tests.test_cli import fails
from tests.tiny import tiny_model
from trunkline.batch_run import Tally
from trunkline.cli import main


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return functools.partial(write_lines, tmp_path)


# ---------------------------------------------------------------- a server that misbehaves


class Moody(PlainHandler):
    """Takes the next of `moods` for each request: a status, or "hang up". Then it answers 200."""

    moods: ClassVar[list[Any]]
    asked: ClassVar[list[bytes]]
    loading: ClassVar[list[int]]  # one for each 503 of /v1/models before it is ready
    models: ClassVar[int] = 200  # the status of /v1/models from the second time on
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.loading:
            self.answer(self.loading.pop(), b"")
            return
        self.answer(200 if not self.asked else self.models, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.asked.append(self.rfile.read(int(self.headers["content-length"])))
        mood = self.moods.pop(0) if self.moods else 200
        if mood == "hang up":
            self.close_connection = True
            return
        if mood == "engine_dead":
            self.answer(500, b'{"error": {"code": "engine_dead"}}')
            return
        self.answer(mood, b'{"usage": {"prompt_tokens": 4, "completion_tokens": 2}}' if mood == 200 else b"busy")


@pytest.fixture
def moody() -> Iterator[Callable[..., tuple[str, list[bytes]]]]:
    stops: list[Callable[[], None]] = []

    def start(*moods: Any, models: int = 200, loading: int = 0) -> tuple[str, list[bytes]]:
        asked: list[bytes] = []
        moods_and_more = {"moods": list(moods), "asked": asked, "models": models, "loading": [503] * loading}
        handler = type("Handler", (Moody,), moods_and_more)
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


def test_some_failures_are_shown_and_the_others_counted(
    write: Write, moody: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = moody(*(400,) * 4)
    code, _ = batch(write(*(line(name) for name in "abcde")), url, "--concurrency", "1")
    told = capsys.readouterr().err
    assert code == 3
    assert "Failed:\n  a: 400: busy\n  b: 400: busy\n  c: 400: busy\n  and 1 more\nOnce the cause" in told


def test_a_server_that_loads_is_waited_for(write: Write, moody: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, asked = moody(loading=2)
    code, _ = batch(write(line("a")), url)
    assert (code, len(asked)) == (0, 1)
    assert capsys.readouterr().err.count("Waiting for it") == 1


def test_the_summary_does_not_count_the_loading(
    write: Write, moody: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that stands still but for the time that a model takes to load."""
    url, _ = moody()
    now = [0.0]

    @contextlib.asynccontextmanager
    async def own_server(_: Any) -> AsyncIterator[str]:
        now[0] += 1000
        yield url

    monkeypatch.setattr("trunkline.batch_server.own_server", own_server)
    monkeypatch.setattr("trunkline.cli_batch.time", SimpleNamespace(monotonic=lambda: now[0]))
    source = write(line("a"))
    assert main(["run-batch", "-i", str(source), "-o", str(source.with_name("out.jsonl")), "--model", "m"]) == 0
    assert "1 of them in 0.0 s" in capsys.readouterr().out


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
    assert (code, first["response"], first["error"]["code"], first["error"]["line"]) == (3, None, "no_answer", 1)
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


@pytest.mark.slow
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
        (["--base-url", "127.0.0.1:9"], 1, "No server answers at http://127.0.0.1:9/v1: Connection refused."),
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
    assert code == 3, "finished, and some failed"
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
    told = capsys.readouterr()
    assert "4 succeeded, 3 failed" in told.out
    assert told.err.splitlines()[-5:] == [
        "Failed:",
        "  line 3: invalid_request: Line 3 is not JSON: Expecting value: line 1 column 1 (char 0).",
        "  refused: 400: 'max_tokens' is -1; allowed is an integer from 0 to 2147483647.",
        "  elsewhere: 404, model_not_found: The model 'another' is not served here; served is 'tiny'.",
        "Once the cause is mended, --retry-failed asks for them again.",
    ]


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

"""The command line: flags, defaults, words for mistakes; and `trunkline chat` against a server."""

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import trunkline
from trunkline.cli import main, make_parser, serve_config
from trunkline.cli_chat import chat
from trunkline.config import ServeConfig
from trunkline.errors import StartupError


def config(*arguments: str) -> ServeConfig:
    return serve_config(make_parser().parse(["serve", *arguments]))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one sentence on stderr."""
    try:
        code = main(arguments)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        code = ended.code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return code, line


DEFAULTS = {
    "--host": "127.0.0.1",
    "--port": "8000",
    "--dtype": "auto",
    "--load-format": "auto",
    "--generation-config": "auto",
    "--block-size": "16",
    "--enable-prefix-caching": "True",
    "--scheduling-policy": "window",
    "--max-num-seqs": "256",
    "--max-num-batched-tokens": "512",
    "--device": "auto",
    "--seed": "0",
    "--max-model-len": "the model's own length",
    "--threads": "all cores",
    "--served-model-name": "MODEL as given",
}


def test_defaults_are_what_people_know() -> None:
    served = config("folder")
    assert served.engine.model.path == "folder"
    assert served.engine.model.max_model_len is None
    assert served.engine.cache.block_size == 16
    assert served.engine.cache.enable_prefix_caching is True
    assert served.engine.scheduler.max_num_seqs == 256
    assert served.engine.scheduler.max_num_batched_tokens == 512
    assert (served.api.host, served.api.port) == ("127.0.0.1", 8000)
    assert served.api.served_model_names == ("folder",)


@pytest.mark.parametrize(("flag", "default"), DEFAULTS.items())
def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str], flag: str, default: str) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    described = re.split(rf" {flag}[ ,]", text[text.index("options:") :])[1]
    assert f"(default: {default})" in described[: described.index(")") + 1]


def test_flags_reach_their_places() -> None:
    served = config(
        *("--model", "m.gguf", "--port", "0", "--served-model-name", "a", "b", "--no-enable-prefix-caching"),
        *("--kv-cache-memory", "1.5GiB", "--max-model-len", "128", "--scheduling-policy", "lpm", "--block-size", "32"),
        *(
            "--max-num-seqs",
            "3",
            "--max-num-batched-tokens",
            "64",
            "--seed",
            "9",
            "--load-format",
            "dummy",
            "--threads",
            "2",
        ),
        *("--dtype", "float32", "--api-key", "k", "--chat-template", "t.jinja", "--device", "cpu"),
    )
    engine, api = served.engine, served.api
    assert (engine.model.path, engine.model.load_format, engine.model.dtype) == ("m.gguf", "dummy", "float32")
    assert (engine.model.max_model_len, engine.model.seed) == (128, 9)
    assert engine.cache.kv_cache_memory == 3 * 2**29
    assert engine.cache.enable_prefix_caching is False
    assert engine.cache.block_size == 32
    assert (engine.scheduler.policy, engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (
        "lpm",
        3,
        64,
    )
    assert (engine.worker.device, engine.worker.threads) == ("cpu", 2)
    assert api.served_model_names == ("a", "b")
    assert (api.api_key, api.chat_template, api.port) == ("k", "t.jinja", 0)


def test_gguf_is_served_under_its_bare_name() -> None:
    assert config("/some/where/Model.Q4.gguf").api.served_model_names == ("Model.Q4",)


def test_without_a_model_the_built_in_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.models.checkpoint.builtin_model", lambda: "/x/Built-In.gguf")
    served = config()
    assert served.engine.model.path == "/x/Built-In.gguf"
    assert served.api.served_model_names == ("Built-In",)


def test_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_API_KEY", "from-environment")
    assert config("m").api.api_key == "from-environment"
    assert config("m", "--api-key", "from-flag").api.api_key == "from-flag"
    monkeypatch.setenv("TRUNKLINE_API_KEY", "")
    assert config("m").api.api_key is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--max-num-seq", "3"], 2, "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--max_model_len=5"], 2, "did you mean --max-model-len?"),
        (["serve", "--dtype", "int3"], 2, "int3"),
        (["serve", "--port", "many"], 2, "many"),
        (["serve", "--kv-cache-memory", "4 parsecs"], 2, "4 parsecs"),
        (["serve", "m", "--port", "70000"], 1, "--port is 70000; allowed is 0 to 65535"),
        (["serve", "m", "--block-size", "0"], 1, "block-size is 0; allowed is an integer of at least 1."),
        (["serve", "m", "--max-num-seqs", "-1"], 1, "max-num-seqs is -1"),
        (["serve", "m", "--model", "n"], 1, "Two models are named"),
        (["serve", "/does/not/exist", "--port", "0"], 1, "/does/not/exist"),
        (["serve", "m", "--host", "no.such.host.invalid"], 1, "no.such.host.invalid"),
        (["serve", "m", "--host", ""], 1, "--host is ''; name an address"),
        (["serve", ""], 1, "The model is ''; give the path"),
        (["serve", "--model", ""], 1, "The model is ''; give the path"),
        (["dance"], 2, "dance"),
        ([], 2, "command"),
        (["bench", "serve", "--workload", "W99"], 1, "W99"),
        (
            ["chat", "--url", "http://127.0.0.1:9/v1"],
            1,
            "No server answers at http://127.0.0.1:9/v1: Connection refused.",
        ),
        (["chat", "--url", "nonsense"], 1, "nonsense"),
    ],
)
def test_mistakes_get_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    seen, line = fails(capsys, *arguments)
    assert (seen, words in line) == (code, True), line


def test_verbose_shows_the_traceback() -> None:
    with pytest.raises(StartupError):
        main(["serve", "/does/not/exist", "--port", "0", "-v"])


def test_python_m_trunkline() -> None:
    command = [sys.executable, "-m", "trunkline", "--version"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.stdout == f"trunkline {trunkline.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom trunkline.cli import make_parser\nmake_parser().format_help()\n"
        "heavy = {'torch', 'numpy', 'fastapi', 'pydantic', 'zmq', 'tokenizers', 'aiohttp'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------- chat


class Answerer(BaseHTTPRequestHandler):
    """Lists one model; answers a chat with the number of its messages, in two pieces. The word "fail" fails."""

    asked: ClassVar[list[dict[str, Any]]]

    def do_GET(self) -> None:
        self._send(200, b'{"data": [{"id": "the-model"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({**body, "authorization": self.headers["authorization"]})
        last = body["messages"][-1]["content"]
        if last == "refuse":
            self._send(400, b'{"error": {"message": "The server refuses."}}')
            return
        pieces = [str(len(body["messages"])), " messages"]
        chunks: list[Any] = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        if last == "break":
            chunks = [chunks[0], {"error": {"message": "The engine died."}}]
        if last == "nonsense":
            chunks = [chunks[0], {"choices": [{"text": "of another endpoint"}]}]
        if last == "page":
            self._send(200, b"<html>Welcome</html>")
            return
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, {"choices": []}]]
        done = "" if last == "vanish" else "data: [DONE]\n\n"
        self._send(200, "".join([": ping\n\n", *events, done]).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def answerer() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of the server, and what it was asked."""
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (Answerer,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()
        thread.join()


Answers = tuple[str, list[dict[str, Any]]]


def test_conversation_grows_and_starts_over(answerer: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    url, asked = answerer
    lines = io.StringIO("hello\n\nagain\n/new\nfresh\n/quit\nnever\n")
    assert chat(url + "/", system="be brief", lines=lines) == 0
    answers = capsys.readouterr().out.splitlines()[1:]
    assert answers == ["2 messages", "4 messages", "2 messages"]
    assert [message["role"] for message in asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[1]["messages"][2]["content"] == "2 messages"
    assert asked[0]["model"] == "the-model"


def test_quick_message_with_options(answerer: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    url, asked = answerer
    arguments = ["chat", "--url", url, "--model", "m", "-q", "hello", "--temperature", "0", "--api-key", "k"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "1 messages\n"
    assert (asked[0]["temperature"], asked[0]["model"], asked[0]["authorization"]) == (0, "m", "Bearer k")
    assert "max_tokens" not in asked[0]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("refuse", "The server refuses."),
        ("break", "The engine died."),
        ("nonsense", "streams no chat; is --url right?"),
        ("page", "streams no chat; is --url right?"),
        ("vanish", "The answer broke off: the server has closed the connection."),
    ],
)
def test_errors_are_told_and_forgotten(
    answerer: Answers, capsys: pytest.CaptureFixture[str], message: str, words: str
) -> None:
    url, asked = answerer
    assert chat(url, lines=io.StringIO(f"{message}\nhello\n")) == 0
    assert words in capsys.readouterr().err
    assert len(asked[1]["messages"]) == 1, "the message that failed is not part of the conversation"
    assert chat(url, quick=message) == 1


def test_what_answers_but_is_no_such_server(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("<html>")
    with pytest.raises(StartupError, match="lists no models; is --url right"):
        chat(f"file://{tmp_path}")

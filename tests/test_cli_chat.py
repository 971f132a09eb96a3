"""`trunkline chat` and `complete` against a server that answers what it is told to."""

import contextlib
import io
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.plain_server import PlainHandler
from tests.test_cli import fails
from trunkline.cli import main
from trunkline.cli_chat import COMMANDS, chat, complete
from trunkline.errors import StartupError


class Answerer(PlainHandler):
    """Lists one model; answers a chat with the number of its messages, in two pieces. The word "fail" fails."""

    asked: ClassVar[list[dict[str, Any]]]
    key: ClassVar[str | None]
    unready: ClassVar[list[str]]  # what it says instead, while there is something: codes of a 503

    def _refused(self) -> bool:
        """Whether the request was refused, for want of the key or of the right path."""
        if not self.path.startswith("/v1/") or self.path.startswith("/v1/v1"):
            self.answer(404, b"{}")
            return True
        if self.unready:
            error = {"message": "The model is still loading.", "code": self.unready.pop(0)}
            self.answer(503, json.dumps({"error": error}).encode())
            return True
        if self.key is not None and self.headers["authorization"] != f"Bearer {self.key}":
            self.answer(401, b'{"error": {"message": "Send a header."}}')
            return True
        return False

    def do_GET(self) -> None:
        if not self._refused():
            self.answer(200, b'{"data": [{"id": "the-model"}]}')

    def do_POST(self) -> None:
        if self._refused():
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({**body, "authorization": self.headers["authorization"]})
        last = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if last == "refuse":
            self.answer(400, b'{"error": {"message": "The server refuses."}}')
            return
        if "prompt" in body:
            chunks: list[Any] = [{"choices": [{"text": piece}]} for piece in (" after ", last)]
        else:
            pieces = [str(len(body["messages"])), " messages"]
            chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        if last == "long":
            chunks[-1]["choices"][0]["finish_reason"] = "length"
        if last == "break":
            chunks = [chunks[0], {"error": {"message": "The engine died."}}]
        if last == "nonsense":
            chunks = [chunks[0], {"choices": [{"of": "another endpoint"}]}]
        if last == "page":
            self.answer(200, b"<html>Welcome</html>")
            return
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, {"choices": []}]]
        done = "" if last == "vanish" else "data: [DONE]\n\n"
        self.answer(200, "".join([": ping\n\n", *events, done]).encode())


@pytest.fixture
def answerer() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of the server, and what it was asked."""
    with answering() as answers:
        yield answers


@contextlib.contextmanager
def answering(key: str | None = None, unready: Sequence[str] = ()) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (Answerer,), {"asked": asked, "key": key, "unready": list(unready)})
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
    assert asked[0]["max_tokens"] == 512


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


def test_texts_are_continued_each_for_itself(answerer: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    url, asked = answerer
    assert complete(url, lines=io.StringIO("One\n\nTwo\n/quit\nThree\n"), options={"max_tokens": 5}) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [" after One", " after Two"]
    assert [(body["prompt"], body["max_tokens"]) for body in asked] == [("One", 5), ("Two", 5)]
    assert all("messages" not in body for body in asked)


def test_quick_completion_with_options(answerer: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    url, asked = answerer
    flags = ["--url", url, "--model-name", "m", "-q", "Once upon", "--temperature", "0", "--api-key", "k"]
    assert main(["complete", *flags]) == 0
    assert capsys.readouterr().out == " after Once upon\n"
    assert (asked[0]["temperature"], asked[0]["model"], asked[0]["authorization"]) == (0, "m", "Bearer k")
    assert asked[0]["max_tokens"] == 128


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("refuse", "The server refuses."), ("nonsense", "streams no text; is --url right?"), ("vanish", "broke off")],
)
def test_errors_of_completions_are_told(
    answerer: Answers, capsys: pytest.CaptureFixture[str], prompt: str, words: str
) -> None:
    url, _ = answerer
    assert complete(url, quick=prompt) == 1
    assert words in capsys.readouterr().err


def test_what_answers_but_is_no_such_server(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("<html>")
    with pytest.raises(StartupError, match="lists no models; is --url right"):
        chat(f"file://{tmp_path}")


@pytest.mark.parametrize("flag", ["--url", "--base-url"])
@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_address_with_or_without_v1(
    answerer: Answers, capsys: pytest.CaptureFixture[str], flag: str, ending: str
) -> None:
    url, _ = answerer
    assert main(["chat", flag, url.removesuffix("/v1") + ending, "-q", "hello"]) == 0
    assert capsys.readouterr().out == "1 messages\n"


@pytest.mark.parametrize("model", [[], ["--model", "m"]])
def test_key_that_is_missing_or_wrong_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: list[str]
) -> None:
    monkeypatch.delenv("TRUNKLINE_API_KEY", raising=False)
    with answering("secret") as (url, asked):
        arguments = ["chat", "--url", url, "-q", "hello", *model]
        give = "give the right one with --api-key KEY or $TRUNKLINE_API_KEY."
        sentence = f"trunkline: error: The server at {url}"
        assert fails(capsys, *arguments) == (1, f"{sentence} wants an API key; {give}")
        assert fails(capsys, *arguments, "--api-key", "guess") == (1, f"{sentence} refuses this API key; {give}")
        monkeypatch.setenv("TRUNKLINE_API_KEY", "secret")
        assert main(arguments) == 0
    assert len(asked) == 1


# ---------------------------------------------------------------- a server that loads


@pytest.mark.parametrize("model", [[], ["--model", "m"]])
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_server_that_loads_is_waited_for(capsys: pytest.CaptureFixture[str], command: str, model: list[str]) -> None:
    with answering(unready=["model_loading"] * 2) as (url, asked):
        assert main([command, "--url", url, "-q", "hello", *model]) == 0
    assert len(asked) == 1
    assert capsys.readouterr().err == "The model is still loading. Waiting for it; Ctrl-C ends that.\n", "once"


def test_not_for_ever(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.cli_client.LONGEST_WAIT", 0)
    unready = ["model_loading"] * 9
    with answering(unready=unready) as (url, asked):
        assert main(["chat", "--url", url, "-q", "hello"]) == 1
    assert asked == [] and "error: The model is still loading." in capsys.readouterr().err


def test_one_that_has_lost_its_engine_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(unready=["engine_dead"]) as (url, asked):
        assert fails(capsys, "chat", "--url", url, "-q", "hello")[0] == 1
    assert asked == []


# ---------------------------------------------------------------- words that are no message


def test_commands_are_not_sent(answerer: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    url, asked = answerer
    assert chat(url, lines=io.StringIO("/help\n/foo bar\nexit\n quit\n /etc is a folder\n/exit\nnever\n")) == 0
    told = capsys.readouterr()
    assert [body["messages"][-1]["content"] for body in asked] == [" /etc is a folder"]
    assert told.out.splitlines()[1:] == [COMMANDS, "1 messages"]
    assert told.err.splitlines() == [
        "There is no /foo; /help lists what there is. With a space before it, the line is sent.",
        "'exit' is not sent: /quit, or Ctrl-D, ends the chat.",
        "'quit' is not sent: /quit, or Ctrl-D, ends the chat.",
    ]
    assert all(word in COMMANDS for word in ("/new", "/quit", "/exit", "/help"))


def test_an_answer_that_is_cut_off_says_so(answerer: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = answerer
    assert main(["chat", "--url", url, "-q", "long", "--max-tokens", "7"]) == 0
    assert "has reached --max-tokens" in capsys.readouterr().err
    assert chat(url, lines=io.StringIO("long\nshort\n")) == 0
    assert capsys.readouterr().err.count("has reached --max-tokens") == 1


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_words_without_a_flag_are_meant_as_a_message(capsys: pytest.CaptureFixture[str], command: str) -> None:
    told = f"trunkline {command}: error: unknown argument hello; to send a text, write --quick "
    assert fails(capsys, command, "hello") == (2, told + "hello")
    assert fails(capsys, command, "hello", "it's me") == (2, told + "'hello it'\"'\"'s me'")
    assert fails(capsys, command, "hello", "--quik")[1].endswith("unknown argument --quik; did you mean --quick?")

"""`trunkline chat`: a conversation in the terminal with any server that speaks the OpenAI API. Standard library only."""

import contextlib
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from trunkline.config import API_KEY_VARIABLE
from trunkline.errors import StartupError, TrunklineError

TIMEOUT = 600.0  # seconds without a byte; a long prompt on a slow machine takes its time


class ServerError(TrunklineError):
    """The server refused, or the connection broke."""


class KeyRefused(ServerError):
    """The server wants an API key, or another one."""


class ChatClient:
    """Talks to one server.

    url      e.g. "http://127.0.0.1:8000", with or without the trailing /v1
    options  further fields of every request; those that are None are left out
    """

    def __init__(self, url: str, *, api_key: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._has_key = bool(api_key)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._options = {name: value for name, value in (options or {}).items() if value is not None}

    def first_model(self) -> str:
        """Name of the first model that is served. Raises StartupError if no server answers, or none to this API key."""
        try:
            with self._open("/models") as answer:
                models = json.load(answer)["data"]
            return str(models[0]["id"])
        except KeyRefused as error:
            raise StartupError(str(error)) from None
        except ServerError as error:
            raise StartupError(f"{error} Start one with `trunkline serve`, or give another --url.") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise StartupError(f"What answers at {self._url} lists no models; is --url right?") from None

    def answer(self, model: str, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the answer as they come. Raises ServerError."""
        body = {"model": model, "messages": messages, "stream": True, **self._options}
        with self._open("/chat/completions", body) as stream:
            try:
                yield from _pieces(stream)
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"The answer broke off: {error or type(error).__name__}.") from None
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ServerError(f"What answers at {self._url} streams no chat; is --url right?") from None

    def fetch(self, path: str, body: object = None) -> Any:
        """What a route under /v1 answers; with a body, to a POST. Raises StartupError if it is no JSON, or an error."""
        try:
            with self._open(path, body) as answer:
                return json.load(answer)
        except ServerError as error:
            raise StartupError(str(error)) from None
        except (OSError, http.client.HTTPException, ValueError):
            raise StartupError(f"What answers at {self._url} is no Trunkline server; is --url right?") from None

    @contextlib.contextmanager
    def _open(self, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        sent = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, sent, self._headers)
            answer = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 401:
                    seen = "refuses this API key" if self._has_key else "wants an API key"
                    give = f"give the right one with --api-key KEY or ${API_KEY_VARIABLE}"
                    raise KeyRefused(f"The server at {self._url} {seen}; {give}.") from None
                raise ServerError(_message(error.read(), error.code)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"No server answers at {self._url}: {getattr(reason, 'strerror', None) or reason}."
            ) from None
        with answer:
            yield answer


def _pieces(stream: http.client.HTTPResponse) -> Iterator[str]:
    """The text of a stream of chunks, which [DONE] ends. Raises ServerError, and what broken chunks raise."""
    some = False
    for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        some = True
        if "error" in chunk:
            raise ServerError(str(chunk["error"].get("message")))
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    if not some:
        raise ValueError("no event of a stream")
    raise ServerError("The answer broke off: the server has closed the connection.")


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answers with status {status}."


def chat(
    url: str,
    *,
    model: str | None = None,
    system: str | None = None,
    quick: str | None = None,
    api_key: str | None = None,
    options: Mapping[str, Any] | None = None,
    lines: TextIO | None = None,
) -> int:
    """Hold a conversation; returns the exit code. Raises StartupError if no server answers.

    quick  send this one message and return
    lines  where messages are read from, one a line; None: standard input
    """
    client = ChatClient(url, api_key=api_key, options=options)
    model = model or client.first_model()
    opening = [{"role": "system", "content": system}] if system else []
    if quick is not None:
        return 0 if _turn(client, model, [*opening, {"role": "user", "content": quick}]) is not None else 1
    print(f"Talking to {model} at {url}. /new starts over, /quit or Ctrl-D ends.")
    messages = list(opening)
    for line in _read_lines(lines):
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                break
            case "/new":
                messages = list(opening)
                continue
        messages.append({"role": "user", "content": line})
        answer = _turn(client, model, messages)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})
    return 0


def _turn(client: ChatClient, model: str, messages: list[dict[str, str]]) -> str | None:
    """Print an answer as it comes; Ctrl-C cuts it short. Returns None if there is none."""
    pieces = []
    try:
        for piece in client.answer(model, messages):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except ServerError as error:
        print(f"trunkline: error: {error}", file=sys.stderr)
        return None
    print()
    return "".join(pieces)


def _read_lines(lines: TextIO | None) -> Iterator[str]:
    if lines is None and not sys.stdin.isatty():
        lines = sys.stdin
    if lines is not None:
        yield from (line.rstrip("\n") for line in lines)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines and remembers them
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return

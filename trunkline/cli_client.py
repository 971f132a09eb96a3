"""A client of a running server, for commands in the terminal. Standard library only, imported when a request is sent."""

import contextlib
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trunkline.config import API_KEY_VARIABLE
from trunkline.errors import StartupError, TrunklineError

TIMEOUT = 600.0  # seconds without a byte; a long prompt on a slow machine takes its time
LONGEST_WAIT = 600.0  # seconds for a server that loads its model
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 30.0  # seconds between two tries meanwhile, whatever the server asks for
LOST = ("engine_dead", "shutting_down")  # codes of a 503 after which waiting does not help


class ServerError(TrunklineError):
    """The server refused, or the connection broke."""


class KeyRefused(ServerError):
    """The server wants an API key, or another one."""


class ApiClient:
    """Talks to one server. One that is not ready yet, and says when to come again, is waited for, with a line on stderr.

    url      e.g. "http://127.0.0.1:8000", with or without the trailing /v1
    options  further fields of every request; those that are None are left out

    finish_reason   of the last answer, as far as it has come: "stop", "length"
    """

    def __init__(self, url: str, *, api_key: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._has_key = bool(api_key)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.finish_reason: str | None = None
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
        """Pieces of the answer to a chat as they come. Raises ServerError."""
        return self._stream("/chat/completions", {"model": model, "messages": messages}, "chat", _of_chat)

    def complete(self, model: str, prompt: str) -> Iterator[str]:
        """Pieces of what continues a text, as they come. Raises ServerError."""
        return self._stream("/completions", {"model": model, "prompt": prompt}, "text", _of_text)

    def _stream(self, path: str, body: dict[str, Any], what: str, read: Callable[[Any], str | None]) -> Iterator[str]:
        with self._open(path, {**body, "stream": True, **self._options}) as stream:
            self.finish_reason = None
            try:
                for choice in _choices(stream):
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    if text := read(choice):
                        yield text
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"The answer broke off: {error or type(error).__name__}.") from None
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ServerError(f"What answers at {self._url} streams no {what}; is --url right?") from None

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
        wait = _Wait()
        while (answer := self._try(path, sent, wait)) is None:
            wait.pause()
        with answer:
            yield answer

    def _try(self, path: str, sent: bytes | None, wait: "_Wait") -> Any:
        """The answer as http.client's, or None if it is worth a wait. Raises ServerError."""
        try:
            request = urllib.request.Request(self._url + path, sent, self._headers)
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 401:
                    seen = "refuses this API key" if self._has_key else "wants an API key"
                    give = f"give the right one with --api-key KEY or ${API_KEY_VARIABLE}"
                    raise KeyRefused(f"The server at {self._url} {seen}; {give}.") from None
                told = _error(error.read())
                message = str(told.get("message") or f"The server answers with status {error.code}.")
                after = error.headers.get("retry-after", "")
                if error.code == 503 and told.get("code") not in LOST and wait.is_worth(after, message):
                    return None
                raise ServerError(message) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"No server answers at {self._url}: {getattr(reason, 'strerror', None) or reason}."
            ) from None


class _Wait:
    """For a server that is not ready: as long as it asks for, but not for ever."""

    def __init__(self) -> None:
        self._end: float | None = None
        self._seconds = 0.0

    def is_worth(self, after: str, message: str) -> bool:
        """Whether to come again; `after` is the header retry-after, in seconds. Says so once."""
        if not (after.isascii() and after.isdecimal()):
            return False
        if self._end is None:
            self._end = time.monotonic() + LONGEST_WAIT
            print(f"{message} Waiting for it; Ctrl-C ends that.", file=sys.stderr)
        self._seconds = min(max(float(after), SHORTEST_PAUSE), LONGEST_PAUSE)
        return time.monotonic() + self._seconds <= self._end

    def pause(self) -> None:
        """Until the next try."""
        time.sleep(self._seconds)


def _of_chat(choice: Any) -> str | None:
    text: str | None = choice["delta"].get("content")
    return text


def _of_text(choice: Any) -> str | None:
    text: str | None = choice["text"]
    return text


def _choices(stream: http.client.HTTPResponse) -> Iterator[Any]:
    """All choices of a stream of chunks, which [DONE] ends. Raises ServerError, and what broken chunks raise."""
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
        yield from chunk["choices"]
    if not some:
        raise ValueError("no event of a stream")
    raise ServerError("The answer broke off: the server has closed the connection.")


def _error(body: bytes) -> dict[str, Any]:
    """What an answer with another status than 200 says, in OpenAI's envelope, or {}."""
    try:
        told = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return told if isinstance(told, dict) else {}

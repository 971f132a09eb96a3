"""The two files of a batch, in OpenAI's format: requests, one a line, and what became of each. Knows no network.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}                           a request
    {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}}, "error": null}

    requests = read_requests("in.jsonl")
    with Results("out.jsonl", requests) as results:
        for request in results.missing():         # all, or after a run that was cut off, what that one has not done
            results.add(request, result)
        results.finish()                          # in the order of the requests

Each result is on its line as soon as there is one. Whatever ends the process, at most the last line is cut short, and the
next run takes it away.
"""

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Self

from trunkline.errors import ConfigError, StartupError, shown

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
ID_PREFIX = "batch_req_"
LINE_START = b'{"id": "' + ID_PREFIX.encode()  # of each result
Key = str | int  # a request's custom_id, or the number of a line that has none


class Request(NamedTuple):
    """A line of the input.

    line       its number, from 1
    custom_id  None: it has none that could be read
    url        one of URLS; "" if `problem`
    body       what to send; empty if `problem`
    problem    why it cannot be sent, as a sentence, or None
    """

    line: int
    custom_id: str | None
    url: str
    body: dict[str, Any]
    problem: str | None = None

    @property
    def key(self) -> Key:
        return self.line if self.custom_id is None else self.custom_id


class Result(NamedTuple):
    """What became of a request: an HTTP answer, or why there is none.

    request_id  the server's name of it, or ""
    body        the JSON that was answered
    """

    status_code: int = 0
    request_id: str = ""
    body: Any = None
    error: dict[str, Any] | None = None

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.status_code == 200


def read_requests(path: str | Path) -> list[Request]:
    """All requests of a file, in order; lines that are none come with their `problem`, empty lines not at all.

    Raises ConfigError if it cannot be read, holds nothing, or two lines have the same custom_id.
    """
    requests: list[Request] = []
    seen: dict[str, int] = {}
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(_request(number, line))
    except OSError as error:
        raise ConfigError(f"The batch {path} cannot be read: {error.strerror}.") from None
    for request in requests:
        if (
            request.custom_id is not None
            and (first := seen.setdefault(request.custom_id, request.line)) != request.line
        ):
            raise ConfigError(
                f"{path}: lines {first} and {request.line} have the same custom_id, {shown(request.custom_id)}; give each its own,"
                " for results are told apart by it."
            )
    if not requests:
        raise ConfigError(f"The batch {path} holds no request; write one JSON object on each line.")
    return requests


def _request(number: int, line: bytes) -> Request:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return Request(number, None, "", {}, f"Line {number} is not JSON: {why}.")
    if not isinstance(row, dict):
        return Request(number, None, "", {}, f"Line {number} is {shown(row)}; allowed is a JSON object.")
    custom_id = row.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Request(number, None, "", {}, f"Line {number}: custom_id is {shown(custom_id)}; allowed is a text.")
    problem = _problem(row)
    if problem is not None:
        return Request(number, custom_id, "", {}, f"Line {number}: {problem}")
    return Request(number, custom_id, row["url"], row["body"])


def _problem(row: dict[str, Any]) -> str | None:
    if row.get("method") != "POST":
        return f"method is {shown(row.get('method'))}; allowed is 'POST'."
    if row.get("url") not in URLS:
        return f"url is {shown(row.get('url'))}; allowed is one of {', '.join(URLS)}."
    if not isinstance(row.get("body"), dict):
        return f"body is {shown(row.get('body'))}; allowed is a JSON object."
    if row["body"].get("stream"):
        return "stream is true; in a batch answers come whole, so leave it out."
    return None


class _Place(NamedTuple):
    """A result in the file: where its line begins, its bytes, and whether the status is 200."""

    start: int
    length: int
    succeeded: bool


class OutputFailed(StartupError):
    """A result could not be written, for want of room, say. What is done is in the output file; the same command goes on from there."""


class Results:
    """The output file, open for appending, and what is in it already. Only one process at a time may have it.

    retry_failed  results other than 200 count as missing; new ones take their places. Those of lines that were no requests
                  are dropped, for the lines may have been mended

    Raises ConfigError if it cannot be written, is no regular file, another process has it, or it holds something else than
    results of these requests.
    """

    def __init__(self, path: str | Path, requests: Sequence[Request], *, retry_failed: bool = False) -> None:
        self.path = Path(path)
        self._requests = requests
        self._retry_failed = retry_failed
        self._places: dict[Key, _Place] = {}
        if self.path.exists() and not self.path.is_file():  # a device has no end, and must not be replaced
            raise ConfigError(f"--output-file is {shown(str(path))}, which is no regular file; name another one.")
        try:
            self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 - it lives as long as this object
        except OSError as error:
            raise ConfigError(
                f"--output-file is {shown(str(path))}, which cannot be written: {error.strerror}."
            ) from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # only of what `add` could not write, and has said
            self._file.close()

    @property
    def num_done(self) -> int:
        """Requests whose result is in the file."""
        return len(self._places)

    @property
    def num_succeeded(self) -> int:
        """Those of them with status 200."""
        return sum(place.succeeded for place in self._places.values())

    def missing(self) -> Iterator[Request]:
        """Requests without a result yet, in order."""
        return (request for request in self._requests if request.key not in self._places)

    def failures(self) -> Iterator[str]:
        """Of each result other than 200, in order, before `finish`: "a: 400, invalid_value: …"; "line 3: …"."""
        for request in self._requests:
            place = self._places.get(request.key)
            if place is not None and not place.succeeded:
                self._file.seek(place.start)
                name = f"line {request.line}" if request.custom_id is None else request.custom_id
                yield f"{name}: {_why(json.loads(self._file.read(place.length)))}"

    def add(self, request: Request, result: Result) -> None:
        """Append a line, and hand it to the system at once. Raises OutputFailed."""
        response = None
        if result.error is None:
            response = {"status_code": result.status_code, "request_id": result.request_id, "body": result.body}
        line: dict[str, Any] = {
            "id": f"{ID_PREFIX}{uuid.uuid4().hex}",
            "custom_id": request.custom_id,
            "response": response,
            "error": result.error,
        }
        written = _as_line(line)
        try:
            place = _Place(self._file.seek(0, os.SEEK_END), len(written), result.succeeded)
            self._file.write(written)
            self._file.flush()
        except OSError as error:
            self._failed(error)
        self._places[request.key] = place

    def finish(self) -> None:
        """Put the lines into the order of the requests, one for each. The file is replaced as a whole, or not at all.

        Raises OutputFailed.
        """
        places = [self._places[request.key] for request in self._requests if request.key in self._places]
        if places == sorted(places) and sum(place.length for place in places) == self._file.seek(0, os.SEEK_END):
            return
        path = self.path.resolve()  # a link stays one
        ordered = path.with_name(f"{path.name}.ordered")
        try:
            with open(ordered, "wb") as file:
                for start, length, _ in places:
                    self._file.seek(start)
                    file.write(self._file.read(length))
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(path, ordered)
            os.replace(ordered, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                ordered.unlink(missing_ok=True)
            self._failed(error)

    def _failed(self, error: OSError) -> NoReturn:
        raise OutputFailed(
            f"{self.path} cannot be written: {error.strerror}. What is in it is kept: once it can be, run the same command"
            " again to go on."
        ) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"Another batch is writing {self.path}; wait for it, or name another --output-file."
            ) from None

    def _read(self) -> None:
        """Note what is done. A last line that was cut short is taken away, or ended if only its end is missing; nothing else
        is ever changed."""
        wanted = {request.key for request in self._requests}
        self._file.seek(0)
        start = 0
        for number, line in enumerate(self._file, start=1):
            has_end = line.endswith(b"\n")
            if not has_end and not _is_json(line) and (line.startswith(LINE_START) or LINE_START.startswith(line)):
                self._file.truncate(start)
                break
            key, succeeded = self._result(number, line)
            is_dropped = self._retry_failed and isinstance(key, int)
            if key not in wanted and not is_dropped:
                raise ConfigError(f"{self.path}, line {number} is the result of {_not_in_batch(key)}")
            if not has_end:
                self._file.write(b"\n")
            if not is_dropped:
                self._places[key] = _Place(start, len(line) + (not has_end), succeeded)
            start += len(line)
        if self._retry_failed:
            self._places = {key: place for key, place in self._places.items() if place.succeeded}

    def _result(self, number: int, line: bytes) -> tuple[Key, bool]:
        try:
            row = json.loads(line)
            if not str(row["id"]).startswith(ID_PREFIX):
                raise ValueError
            error, response = row["error"], row["response"]
            key = row["custom_id"] if row["custom_id"] is not None else int(error["line"])
            if not isinstance(key, Key):
                raise TypeError
            return key, error is None and response["status_code"] == 200
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"{self.path}, line {number} is no result of a batch, so nothing is written there; name another --output-file."
            ) from None


def _why(row: dict[str, Any]) -> str:
    """Status, code and message of a result, as far as it has them."""
    response = row["response"] or {}
    body = response.get("body")
    error = row["error"] or (body.get("error") if isinstance(body, dict) else body)
    fields = [error.get("code"), error.get("message")] if isinstance(error, dict) else [error]
    status = response.get("status_code")
    code = ", ".join(str(part) for part in (status, *fields[:-1]) if part)
    return ": ".join(str(part) for part in (code, fields[-1]) if part)


def _not_in_batch(key: Key) -> str:
    otherwise = "name another --output-file, or move that one away."
    if isinstance(key, int):
        return f"input line {key}, which was no request and has changed since; add --retry-failed, {otherwise}"
    return f"{shown(key)}, which is not in this batch; {otherwise}"


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _as_line(row: dict[str, Any]) -> bytes:
    """Half a surrogate pair, which is no text, is escaped; all other characters stand as they are."""
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row).encode() + b"\n"

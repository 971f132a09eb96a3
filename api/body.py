"""Reading a request's body: bounded, strict JSON, with errors that name the parameter.

Refused: NaN and Infinity, numbers beyond float64, text that is not UTF-8, half surrogate pairs, nesting that
exhausts the parser, and more fields than anybody means. Knows no endpoint.
"""

import json
import math
from collections.abc import Iterator, Sized
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from trunkline.api.errors import BodyTooLarge
from trunkline.errors import InvalidParameter

LONGEST_PATH = 200  # characters of a parameter's path that are repeated in an error
MOST_FIELDS = 10_000  # of a body: unknown ones are sorted and compared, and other requests wait meanwhile


async def read_json(request: Request, max_bytes: int, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body, a JSON object.

    may_be_empty  no body at all is an object without fields

    Raises BodyTooLarge as soon as that is known, InvalidParameter for what is not strict JSON, ClientDisconnect.
    """
    body = await _read(request, max_bytes)
    return {} if may_be_empty and not body else parse_json(body)


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(seen: int, allowed: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body has at least {seen} bytes; allowed are {allowed}. Send less, or split it.")


def parse_json(body: bytes) -> dict[str, Any]:
    """Raises InvalidParameter; where it can, it names the parameter."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidParameter("The request body is nested too deeply to be read.") from None
    except msgspec.DecodeError as error:
        raise _explain(body, error) from None
    if not isinstance(value, dict):
        raise InvalidParameter(f"The request body is a JSON {_kind(value)}; it must be an object.")
    refuse_many(value)
    return value


def refuse_many(fields: Sized, param: str | None = None) -> None:
    """Raises InvalidParameter if `param`, by default the body itself, has too many fields to look at each."""
    if len(fields) > MOST_FIELDS:
        what = f"'{param}'" if param else "The request body"
        message = (
            f"{what} has {len(fields)} fields; allowed are at most {MOST_FIELDS}. Leave out those that nobody reads."
        )
        raise InvalidParameter(message, param=param)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "boolean", str: "string", list: "array"}.get(type(value), "number")


def _explain(body: bytes, error: msgspec.DecodeError) -> InvalidParameter:
    """Python's own parser is laxer: if it can read the body, the offending value can be found and named."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    for path, wrong in _not_json(value):
        param = path.encode("utf-8", "replace").decode()[:LONGEST_PATH] or "body"
        return InvalidParameter(f"'{param}' {wrong}.", param=param)
    return InvalidParameter(f"The request body is not valid JSON: {error}. It must be UTF-8 text of one JSON object.")


def _not_json(value: Any) -> Iterator[tuple[str, str]]:
    """(path, what is wrong) of numbers and strings that Python reads and JSON does not have."""
    unread = [("", value)]
    while unread:
        path, value = unread.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield path, f"is {value}; allowed are finite numbers only"
        elif isinstance(value, str) and not _is_unicode(value):
            yield path, "holds half of a surrogate pair, which is not valid Unicode"
        elif isinstance(value, dict):
            unread += [(f"{path}.{key}".lstrip("."), child) for key, child in reversed(value.items())]
        elif isinstance(value, list):
            unread += [(f"{path}[{index}]", value[index]) for index in reversed(range(len(value)))]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

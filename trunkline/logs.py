"""How log lines look, in every process of a server: for people, or as JSON for machines.

configure("api", "text")
line = {"id": "cmpl-1", "cached_by_tier": {"device": 48}}
logger.info("request", extra=facts(line, short={"id": "cmpl-1", "cached": 48}))

text   INFO 12:00:00 [api] request id=cmpl-1 cached=48
json   {"time":"2026-05-04T12:00:00.123+00:00","level":"INFO","logger":"trunkline.api","message":"request","id":"cmpl-1",
        "cached_by_tier":{"device":48}}

Whatever is logged while a request is answered, by whichever library, ends with its id: `request_id=…`, or "request_id" in JSON.
Of requests this module knows nothing but that id.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import msgspec

_FACTS, _SHORT = "facts", "short_facts"  # attributes of a record

# Of the request that this task or thread works on; "": of none.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def configure(process: str, log_format: str) -> None:
    """Log to stderr, from INFO on.

    process     its name, which a line for people shows
    log_format  one of config.LOG_FORMATS. With "json" Python's warnings are log lines, too
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(log_format == "json")
    # No line shows where it comes from. To find that out for each takes as long as to write it (docs.python.org, Logging HOWTO).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def facts(everything: Mapping[str, Any], *, short: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra` of a line that has more to say than its message: `everything` in JSON, `short` in text."""
    return {_FACTS: everything, _SHORT: short}


class TextFormatter(logging.Formatter):
    """One line for people; facts follow as key=value, in the manner of logfmt."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(levelname)s %(asctime)s [{process}] %(message)s", datefmt="%H:%M:%S")
        self._second = -1  # of Unix time; that of the line before
        self._time = ""  # as it is shown

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if int(record.created) != self._second:
            self._second, self._time = int(record.created), super().formatTime(record, datefmt)
        return self._time

    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = {**getattr(record, _SHORT, {}), **_context()}
        return super().formatMessage(record) + "".join(f" {name}={value}" for name, value in pairs.items())


class JsonFormatter(logging.Formatter):
    """One object a line, whatever the message holds; a traceback is its `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _encodable(record.getMessage()),
            **_context(),
            **getattr(record, _FACTS, {}),
        }
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


def _context() -> dict[str, str]:
    name = request_id.get()
    return {"request_id": name} if name else {}


def _encodable(text: str) -> str:
    """Half of a surrogate pair is no text that UTF-8 can hold."""
    return text.encode("utf-8", "backslashreplace").decode()

"""Log lines: one each, for people or as JSON, whatever a message holds."""

import asyncio
import json
import logging
import sys
import warnings
from datetime import datetime
from typing import Any

import pytest

from trunkline.logs import JsonFormatter, TextFormatter, configure, facts, request_id

FACTS = facts({"id": "cmpl-1", "cached_by_tier": {"device": 48}, "error": None}, short={"id": "cmpl-1", "cached": 48})


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    made = logging.getLogger("trunkline.api").makeRecord("trunkline.api", logging.WARNING, "", 0, message, args, None)
    made.__dict__.update(extra)
    made.created = 1777896000.25
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(made)
    assert "\n" not in line
    read: dict[str, Any] = json.loads(line)
    return read


def test_text_has_the_short_facts() -> None:
    line = TextFormatter("api").format(record("request", **FACTS))
    level, _, rest = line.split(" ", 2)
    assert (level, rest) == ("WARNING", "[api] request id=cmpl-1 cached=48")
    assert TextFormatter("engine").format(record("%d pages", 3)).endswith(" [engine] 3 pages")


def test_every_line_has_its_own_time() -> None:
    formatter, made = TextFormatter("api"), record("so")
    shown = []
    for seconds in (0.0, 0.9, 1.0, 61.0, 0.0):
        made.created = 1777896000.0 + seconds
        shown.append(formatter.format(made).split(" ")[1][-5:])
    assert shown == ["00:00", "00:00", "00:01", "01:01", "00:00"]


def test_json_has_all_facts() -> None:
    line = as_json(record("request", **FACTS))
    assert datetime.fromisoformat(line.pop("time")).timestamp() == 1777896000.25
    assert line == {
        "level": "WARNING",
        "logger": "trunkline.api",
        "message": "request",
        "id": "cmpl-1",
        "cached_by_tier": {"device": 48},
        "error": None,
    }


@pytest.mark.parametrize("text", ["two\nlines", 'a "quote"', "☃", "half \ud83d of a pair", "\x00"])
def test_any_message_is_one_line_of_json(text: str) -> None:
    assert as_json(record("%s", text))["message"] == text.replace("\ud83d", "\\ud83d")


async def test_what_is_logged_for_a_request_has_its_id() -> None:
    """In its own task, in those it starts, in threads it asks; and nowhere else."""
    shown = TextFormatter("api").format

    async def answer(name: str) -> list[str]:
        request_id.set(name)
        child = asyncio.create_task(asyncio.to_thread(lambda: shown(record("below"))))
        return [shown(record("request", **FACTS)), await child, str(as_json(record("so"))["request_id"])]

    first, second = await asyncio.gather(answer("req_1"), answer("req_2"))
    for lines, name in ((first, "req_1"), (second, "req_2")):
        assert lines[0].endswith(f" request id=cmpl-1 cached=48 request_id={name}")
        assert lines[1].endswith(f" below request_id={name}")
        assert lines[2] == name
    assert "request_id" not in shown(record("of nobody")) + JsonFormatter().format(record("of nobody"))


def test_tracebacks() -> None:
    made = record("it broke")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert as_json(made)["exception"].endswith("ValueError: why")
    first, *others = TextFormatter("api").format(made).splitlines()
    assert first.endswith(" [api] it broke")
    assert others[-1] == "ValueError: why"


def test_configure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    for setting in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, setting, getattr(logging, setting))
    configure("api", "json")
    try:
        logging.getLogger("uvicorn.error").warning("of others, too")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("and of Python", stacklevel=1)
    finally:
        logging.captureWarnings(False)
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["logger"], first["message"]) == ("uvicorn.error", "of others, too")
    assert (second["logger"], second["level"]) == ("py.warnings", "WARNING")
    assert "and of Python" in second["message"]

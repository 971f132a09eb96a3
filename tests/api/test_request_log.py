"""The line of a request: one, whatever became of it, and never a word of its text."""

import logging
import re
from typing import Any

import pytest

from trunkline.api.generation import FromRequest, Generation, OutputProcessor
from trunkline.api.metrics import Metrics
from trunkline.api.request_log import LoggedRequest
from trunkline.errors import EngineDead, TrunklineError
from trunkline.logs import JsonFormatter, TextFormatter
from trunkline.messages import CacheReport, Failed, Finished, Tokens
from trunkline.models.tokenizer import Tokenizer
from trunkline.sampling import SamplingParams

TENANT = "0123456789abcdef0123456789abcdef"
WORDS = b"secret words"


class ScriptedInbox:
    """Hands out messages, one at a time; then raises `error`, or is empty."""

    def __init__(self, messages: list[FromRequest], error: TrunklineError | None = None) -> None:
        self.messages = messages
        self.error = error

    async def get(self) -> list[FromRequest]:
        if not self.messages and self.error is not None:
            raise self.error
        return [self.messages.pop(0)] if self.messages else []

    def abort(self, request_id: str) -> None:
        pass

    def close(self, error: TrunklineError | None = None) -> None:
        pass


def tokens(name: str, data: bytes = WORDS, **fields: Any) -> Tokens:
    return Tokens(request_id=name, token_ids=[*data], cached_tokens=16, **fields)


def finished(name: str) -> Finished:
    return Finished(request_id=name, reason="length", prompt_tokens=20, cached_tokens=16, completion_tokens=len(WORDS))


def report(reason: str) -> CacheReport:
    return CacheReport(prompt_tokens=20, cached_tokens=16, cached_by_tier={"device": 16}, reason=reason, expected=WORDS)


def generate(
    tokenizer: Tokenizer, messages: list[FromRequest], error: TrunklineError | None = None, *, num_prompts: int = 1
) -> Generation:
    choices = {name: OutputProcessor(tokenizer, SamplingParams(), index=i) for i, name in enumerate("ab"[:num_prompts])}
    observer = LoggedRequest(Metrics("m"), "req_1", "cmpl-1", TENANT)
    inbox: Any = ScriptedInbox(messages, error)
    return Generation(inbox, choices, prompts=[[*WORDS, *range(8)]] * num_prompts, n=1, observer=observer)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "trunkline.api")
    return caplog


def line(log: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = log.records
    for formatter in (TextFormatter("api"), JsonFormatter()):
        text = formatter.format(record)
        assert "secret" not in text
        assert TENANT not in text
    assert record.getMessage() == "request"
    read: dict[str, Any] = record.__dict__["facts"]
    return dict(read)


def short(log: pytest.LogCaptureFixture) -> str:
    """What people see, without the times."""
    (record,) = log.records
    text = TextFormatter("api").format(record)
    return re.sub(r"(INFO) \S+|(ttft|seconds)=[\d.e-]+", r"\1\2", text)


async def test_finished(tokenizer: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    generation = generate(tokenizer, [tokens("a", cache_report=report("differs")), finished("a")])
    await generation.finish()
    assert not log.records, "the answer is not sent yet"
    generation.close()
    generation.close()
    logged = line(log)
    assert 0 <= logged.pop("ttft_seconds") <= logged.pop("seconds")
    assert logged == {
        "id": "cmpl-1",
        "request_id": "req_1",
        "tenant": "01234567",
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "cached_by_tier": {"device": 16},
        "cache_reasons": {"differs": 1},
        "completion_tokens": len(WORDS),
        "finish_reasons": {"length": 1},
        "error": None,
    }
    assert short(log) == (
        "INFO [api] request id=cmpl-1 tenant=01234567 prompt=20 cached=16 tiers=device:16 reason=differs completion=12"
        " finish=length ttft seconds"
    )


async def test_several_prompts_are_one_line(tokenizer: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    messages: list[FromRequest] = [
        tokens("a", cache_report=report("differs")),
        tokens("b", cache_report=report("unseen")),
        finished("b"),
        finished("a"),
    ]
    generation = generate(tokenizer, messages, num_prompts=2)
    await generation.finish()
    generation.close()
    logged = line(log)
    assert logged["cache_reasons"] == {"differs": 1, "unseen": 1}
    assert (logged["cached_tokens"], logged["cached_by_tier"]) == (32, {"device": 32})
    assert logged["finish_reasons"] == {"length": 2}
    assert "tiers=device:32 reason=differs:1,unseen:1 completion=24 finish=length:2 " in short(log)


async def test_a_prompt_that_was_only_computed_has_no_first_token(
    tokenizer: Tokenizer, log: pytest.LogCaptureFixture
) -> None:
    generation = generate(tokenizer, [tokens("a", b"", cache_report=report("unseen")), finished("a")])
    await generation.finish()
    generation.close()
    logged = line(log)
    assert (logged["ttft_seconds"], logged["finish_reasons"], logged["error"]) == (None, {"length": 1}, None)


async def test_client_that_left(tokenizer: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    generation = generate(tokenizer, [tokens("a")])
    await anext(generation)
    generation.close()
    logged = line(log)
    assert (logged["finish_reasons"], logged["error"]) == ({"abort": 1}, None)


@pytest.mark.parametrize(
    ("messages", "error", "code"),
    [
        (
            [Failed(request_id="a", message="secret", status=429, code="rate_limit_exceeded")],
            None,
            "rate_limit_exceeded",
        ),
        ([Failed(request_id="a", message="secret", status=400, code=None)], None, "400"),
        ([], EngineDead("secret"), "engine_dead"),
    ],
)
async def test_failure(
    tokenizer: Tokenizer,
    log: pytest.LogCaptureFixture,
    messages: list[FromRequest],
    error: TrunklineError | None,
    code: str,
) -> None:
    generation = generate(tokenizer, messages, error)
    with pytest.raises(TrunklineError):
        await generation.finish()
    generation.close()
    logged = line(log)
    assert (logged["error"], logged["ttft_seconds"], logged["completion_tokens"]) == (code, None, 0)
    assert f" completion=0 finish=abort error={code} seconds" in short(log)


async def test_end_by_a_shutdown(tokenizer: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    generation = generate(tokenizer, [])
    generation.close(EngineDead("gone"))
    assert line(log)["error"] == "engine_dead"

"""The line of a request: one, whatever became of it, and never a word of its text or a key."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import Server
from trunkline.api.edge import Edge
from trunkline.api.errors import error_response
from trunkline.api.generation import FromRequest, Generation, OutputProcessor
from trunkline.api.metrics import Metrics
from trunkline.api.request_log import LoggedRequest, Record
from trunkline.api.request_log import log as write
from trunkline.api.tenants import Keys
from trunkline.config import ApiConfig
from trunkline.errors import EngineDead, InvalidParameter, TrunklineError
from trunkline.inputs import NOTHING
from trunkline.logs import JsonFormatter, TextFormatter
from trunkline.messages import CacheReport, Failed, Finished, Tokens
from trunkline.models.tokenizer import Tokenizer
from trunkline.sampling import SamplingParams

TENANT = "0123456789abcdef0123456789abcdef"
WORDS = b"secret words"
ROUTE = "/v1/completions"
ANY = SamplingParams()


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


class Logged(Generation):
    """A generation with the record of its HTTP request, whose line is written when it is closed."""

    record: Record

    def end(self, status: int = 200) -> None:
        self.close()
        self.record.status = status
        write(self.record, ROUTE)


def generate(
    tokenizer: Tokenizer,
    messages: list[FromRequest],
    error: TrunklineError | None = None,
    *,
    num_prompts: int = 1,
    sampling: SamplingParams = ANY,
) -> Logged:
    choices = {name: OutputProcessor(tokenizer, sampling, index=i) for i, name in enumerate("ab"[:num_prompts])}
    observer = LoggedRequest(Metrics("m"), "req_1", "cmpl-1", TENANT)
    inbox: Any = ScriptedInbox(messages, error)
    generation = Logged(
        inbox, choices, prompts=[[*WORDS, *range(8)]] * num_prompts, n=1, observer=observer, sampling=sampling
    )
    generation.record = Record("req_1")
    generation.record.generates(observer)
    return generation


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
    generation.close()
    assert not log.records, "the answer is not sent yet"
    generation.end()
    logged = line(log)
    assert 0 <= logged.pop("ttft_seconds") <= logged.pop("seconds")
    assert logged == {
        "id": "cmpl-1",
        "request_id": "req_1",
        "route": ROUTE,
        "status": 200,
        "tenant": "01234567",
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "cached_by_tier": {"device": 16},
        "cache_reasons": {"differs": 1},
        "completion_tokens": len(WORDS),
        "finish_reasons": {"length": 1},
        "error": None,
        "param": None,
    }
    assert short(log) == (
        "INFO [api] request id=cmpl-1 status=200 tenant=01234567 prompt=20 cached=16 tiers=device:16 reason=differs completion=12"
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
    generation.end()
    logged = line(log)
    assert logged["cache_reasons"] == {"differs": 1, "unseen": 1}
    assert (logged["cached_tokens"], logged["cached_by_tier"]) == (32, {"device": 32})
    assert logged["finish_reasons"] == {"length": 2}
    assert "tiers=device:32 reason=differs:1,unseen:1 completion=24 finish=length:2 " in short(log)


async def test_a_prompt_that_was_only_computed_has_no_first_token_and_is_not_cut(
    tokenizer: Tokenizer, log: pytest.LogCaptureFixture
) -> None:
    messages: list[FromRequest] = [tokens("a", b"", cache_report=report("unseen")), finished("a")]
    generation = generate(tokenizer, messages, sampling=NOTHING)
    await generation.finish()
    generation.end()
    logged = line(log)
    assert (logged["ttft_seconds"], logged["finish_reasons"], logged["error"]) == (None, {"done": 1}, None)


async def test_client_that_left(tokenizer: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    generation = generate(tokenizer, [tokens("a")])
    await anext(generation)
    generation.end()
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
    generation.end(500)
    logged = line(log)
    assert (logged["error"], logged["ttft_seconds"], logged["completion_tokens"]) == (code, None, 0)
    assert f" completion=0 finish=abort error={code} seconds" in short(log)


async def test_end_by_a_shutdown(tokenizer: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    generation = generate(tokenizer, [])
    generation.close(EngineDead("gone"))
    generation.end(500)
    assert line(log)["error"] == "engine_dead"


def test_a_refused_request(log: pytest.LogCaptureFixture) -> None:
    record = Record("req_1")
    record.status, record.tenant = 400, TENANT[:8]
    record.fail(InvalidParameter("secret", code="unsupported_value"))
    write(record, ROUTE)
    assert short(log) == "INFO [api] request status=400 tenant=01234567 error=unsupported_value seconds"
    logged = line(log)
    assert (logged["request_id"], logged["route"]) == ("req_1", ROUTE)


@pytest.mark.parametrize(
    ("param", "told"),
    [
        ("max_tokens", "max_tokens"),
        ("messages[0].content[12].text", "messages[0].content[12].text"),
        ("tools[3].function.a b=c\nd", "tools[3].function"),
        ("metadata.name_of_somebody", "metadata"),
        ("My_Name", None),
        ("x" * 41, None),
        ("a" + ".b" * 500, "a" + ".b" * 49 + "."),
        (None, None),
    ],
)
@pytest.mark.slow
def test_the_parameter_to_blame(log: pytest.LogCaptureFixture, param: str | None, told: str | None) -> None:
    """But no key that somebody chose, and nothing that would break the line."""
    record = Record("req_1")
    record.status = 400
    record.fail(InvalidParameter("secret", param=param))
    write(record, ROUTE)
    assert line(log)["param"] == told
    assert short(log) == f"INFO [api] request status=400 error=400 {f'param={told} ' if told else ''}seconds"


def test_what_neither_generates_nor_fails_has_no_line(log: pytest.LogCaptureFixture) -> None:
    record = Record("req_1")
    record.status = 200
    write(record, "/v1/models")
    assert not log.records


async def test_an_error_after_the_generation_counts(tokenizer: Tokenizer, log: pytest.LogCaptureFixture) -> None:
    """The model has ended its text, but that is no answer."""
    generation = generate(tokenizer, [tokens("a"), finished("a")])
    await generation.finish()
    generation.close()
    generation.record.fail(InvalidParameter("secret", code="grammar_broken"))
    generation.end(500)
    assert (line(log)["error"], line(log)["finish_reasons"]) == ("grammar_broken", {"length": 1})


@pytest.mark.parametrize("logs_requests", [True, False])
async def test_lines_can_be_left_out(log: pytest.LogCaptureFixture, logs_requests: bool) -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await error_response(InvalidParameter("secret"))(scope, receive, send)

    async def nothing(*_: Any) -> Any:
        pass

    config = ApiConfig(served_model_names=("m",))
    edge = Edge(refuse, keys=Keys(config, b""), metrics=Metrics("m"), logs_requests=logs_requests)
    await edge({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, nothing, nothing)
    await edge({"type": "http", "method": "GET", "path": "/health", "headers": []}, nothing, nothing)
    assert len(log.records) == logs_requests


# ---------------------------------------------------------------- a server

KEY = "sk-CANARY-of-a-key"
CANARY = "CANARYword"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": f"Say {CANARY} again and again"}], "max_tokens": 4}


@pytest.fixture(scope="module", params=["text", "json"])
def told(request: pytest.FixtureRequest, tiny: Path) -> str:
    """All that a server has written, after requests of every kind, each with the canary in it."""
    schema = {"type": "json_schema", "json_schema": {"name": CANARY, "schema": {"enum": [CANARY]}}}
    flags = ["--api-key", KEY, "--log-format", request.param, "--kv-cache-memory", "16MiB", "--verbose"]
    with Server(tiny, *flags) as server:
        server.wait_ready()
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "job-1"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
            for body in (
                {},
                {"stream": True},
                {"response_format": schema},
                {"response_format": {"type": CANARY}},
                {"max_tokens": CANARY},
                {"model": CANARY},
                {"messages": CHAT["messages"] * 4000},
                {CANARY: 1, "messages": CANARY},
            ):
                http.post("/v1/chat/completions", json={**CHAT, **body})
            http.post("/v1/chat/completions", content=b'{"messages": "' + CANARY.encode())
            http.post("/v1/completions", json={"prompt": CANARY}, headers={"authorization": f"Bearer {KEY}x"})
            http.post("/v1/responses", json={"input": CANARY, "max_output_tokens": 4})
            http.post("/v1/messages", json={"max_tokens": 4, "messages": CHAT["messages"], "model": CANARY})
            http.post("/v1/cache/explain", json={"prompt": CANARY})
            http.post("/tokenize", json={"prompt": CANARY})
            http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "the-last"})
        server.wait_for("the-last")
    assert server.wait_exit() == 0
    return server.output


@pytest.mark.slow
def test_no_word_and_no_key_is_in_the_log(told: str) -> None:
    assert "CANARY" not in told


@pytest.mark.slow
def test_every_request_has_a_line_with_its_id(told: str) -> None:
    lines = [line for line in told.splitlines() if "[api] request " in line or '"message":"request"' in line]
    text = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines if not line.startswith("{")]
    found = text or [json.loads(line) for line in lines]
    assert {row["request_id"] for row in found} == {"job-1", "the-last"}
    statuses = [int(row["status"]) for row in found]
    assert [statuses.count(status) for status in (200, 400, 401, 404)] == [5, 5, 1, 2]
    assert len(statuses) == 13
    assert {row.get("error") for row in found} >= {"context_length_exceeded", "invalid_api_key", "model_not_found"}

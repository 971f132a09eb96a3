"""The application without an engine: keys, headers, paths, and what it says while the model loads. No socket, no process."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import trunkline
from trunkline.api import app, fields
from trunkline.api.app import create_app
from trunkline.api.errors import error_response
from trunkline.api.protocol import ChatRequest
from trunkline.api.service import Service
from trunkline.async_llm import AsyncLLM
from trunkline.config import ApiConfig, engine_config
from trunkline.errors import QueueFull
from trunkline.logs import TextFormatter
from trunkline.messages import Loading

KEY = "sk-secret"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def make_service(**config: Any) -> Service:
    api = ApiConfig(**{"served_model_names": ("m", "org/m"), **config})
    return Service(api, AsyncLLM.of(engine_config("nowhere")))


def connect(service: Service) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def locked() -> AsyncIterator[httpx.AsyncClient]:
    async with connect(make_service(api_keys=(KEY,))) as client:
        yield client


@pytest.fixture
async def opened() -> AsyncIterator[httpx.AsyncClient]:
    async with connect(make_service()) as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": "wrong"},
        {"authorization": "Bearer schlüssel"},
    ],
)
async def test_wrong_key_is_401(locked: httpx.AsyncClient, headers: dict[str, str]) -> None:
    sent = {name.encode(): value.encode() for name, value in headers.items()}
    for response in (
        await locked.get("/v1/models", headers=sent),
        await locked.post("http://test//v1//completions", headers=sent),
    ):
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


async def test_wrong_key_is_refused_before_the_body_is_read(locked: httpx.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    assert (await locked.post("/v1/completions", content=body())).status_code == 401


@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}]
)
async def test_right_key_is_let_in(locked: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await locked.get("/v1/models", headers=headers)).status_code == 200


async def test_health_version_and_metrics_need_no_key(locked: httpx.AsyncClient) -> None:
    assert (await locked.get("/health")).status_code == 503
    assert (await locked.get("/version")).json() == {"version": trunkline.__version__}
    assert (await locked.get("/metrics")).status_code == 200


async def test_a_preflight_is_told_that_there_is_no_cors(opened: httpx.AsyncClient) -> None:
    """Else a browser only says that something was blocked."""
    hint = "CORS is not there: let a reverse proxy in front answer preflights."
    sent = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    for headers in (sent, {}):
        response = await opened.options("/v1/chat/completions", headers=headers)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        told = f"Not allowed: OPTIONS /v1/chat/completions. Use POST.{f' {hint}' if headers else ''}"
        assert response.json()["error"]["message"] == told


async def test_all_methods_of_a_path_are_named_where_another_is_tried(opened: httpx.AsyncClient) -> None:
    paths = (await opened.get("/openapi.json")).json()["paths"]
    for path, item in paths.items():
        there = {method.upper() for method in item}
        response = await opened.patch(path)
        assert response.status_code == 405, path
        assert set(response.headers["allow"].split(", ")) == there | ({"HEAD"} if "GET" in there else set()), path
        assert f"Use {response.headers['allow']}." in response.json()["error"]["message"]
    assert (await opened.post("/dashboard/style.css")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path", ["/health", "/version", "/metrics", "/v1/models", "/v1/models/org/m", "/v1/queue", "/docs"]
)
async def test_head_is_get_without_a_body(opened: httpx.AsyncClient, path: str) -> None:
    """Watchdogs ask so whether a server is there; the body is left out by the server beneath."""
    head, get = await opened.head(path), await opened.get(path)
    assert head.status_code == get.status_code
    assert head.headers.keys() == get.headers.keys()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("PUT", "/health", 405)])
async def test_a_query_that_is_no_text_does_not_matter(method: str, path: str, status: int) -> None:
    app, answers = create_app(make_service()), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"\xff=%ff", "headers": []}
    await app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
    assert answers[0]["status"] == status


async def test_while_loading(opened: httpx.AsyncClient) -> None:
    health = await opened.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "loading"
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = await opened.post(path, json=CHAT)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_loading"
        assert response.headers["retry-after"] == "1"
    assert [model["id"] for model in (await opened.get("/v1/models")).json()["data"]] == ["m", "org/m"]


async def test_health_tells_the_progress_of_loading() -> None:
    service = make_service()
    service.loading = Loading(done=3, total=9)
    async with connect(service) as client:
        assert (await client.get("/health")).json()["progress"] == {"done": 3, "total": 9}


async def test_a_lost_engine_is_not_said_to_be_still_loading() -> None:
    service = make_service()
    service.restarting = True
    async with connect(service) as client:
        health = (await client.get("/health")).json()
        assert (health["status"], health["error"]["code"]) == ("restarting", "model_loading")
        assert "is being started again" in health["error"]["message"]
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503


async def test_shutting_down() -> None:
    service = make_service()
    service.stopping = True
    async with connect(service) as client:
        assert (await client.get("/health")).json()["status"] == "stopping"
        assert (await client.post("/v1/chat/completions", json=CHAT)).json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize(
    "path", ["/v1/models/org/m", "/v1//models/org//m", "http://test//v1/models/org/m/", "/v1/models/org%2Fm"]
)
async def test_slashes_are_tidied(opened: httpx.AsyncClient, path: str) -> None:
    response = await opened.get(path)
    assert response.status_code == 200
    assert response.json()["id"] == "org/m"


async def test_models_are_the_same_between_calls(opened: httpx.AsyncClient) -> None:
    first, second = (await opened.get("/v1/models")).json(), (await opened.get("/v1/models/")).json()
    assert first == second
    assert all(model["object"] == "model" and model["owned_by"] for model in first["data"])


async def test_request_id_is_echoed_or_made(opened: httpx.AsyncClient) -> None:
    echoed = await opened.get("/health", headers={"x-request-id": "mine-7"})
    assert echoed.headers["x-request-id"] == "mine-7"
    assert int(echoed.headers["openai-processing-ms"]) >= 0
    for unfit in ("", "x" * 200, "with space"):
        made = await opened.get("/nothing", headers={"x-request-id": unfit})
        assert made.headers["x-request-id"].startswith("req_")


async def test_bug_is_500_with_the_request_id_and_no_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caplog.handler, "formatter", TextFormatter("api"))
    service = make_service()
    service.check_ready = None  # type: ignore[method-assign, assignment]
    async with connect(service) as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "r-1"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "internal_error"
    assert "r-1" in error["message"]
    assert "NoneType" not in response.text
    assert "request_id=r-1" in caplog.text
    assert "NoneType" in caplog.text, "the log has the reason"


async def test_metrics_do_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_method: str) -> None:
        await asyncio.Event().wait()

    service = make_service()
    monkeypatch.setattr(service.llm, "call", never)
    monkeypatch.setattr(app, "STATS_SECONDS", 0)
    async with connect(service) as client:
        page = await client.get("/metrics")
    assert page.status_code == 200
    assert "trunkline:request_failures_total" in page.text
    assert "num_requests_running" not in page.text


async def test_failures_are_counted(opened: httpx.AsyncClient) -> None:
    await opened.post("/v1/chat/completions", json=CHAT)
    await opened.get("/v1/models/other")
    page = (await opened.get("/metrics")).text
    assert 'trunkline:request_failures_total{code="model_loading"} 1.0' in page
    assert 'trunkline:request_failures_total{code="model_not_found"} 1.0' in page


async def test_openapi_describes_the_bodies(opened: httpx.AsyncClient) -> None:
    document = (await opened.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert "messages" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "ChatMessage" in document["components"]["schemas"]
    assert (await opened.get("/docs")).status_code == 200


def test_any_number_of_unknown_fields_is_one_short_line(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(fields, "_warned_keys", set())
    with caplog.at_level(logging.WARNING, "trunkline.api"):
        ChatRequest.parse({**CHAT, "long" * 100_000: 0, **{f"unknown_{number}": 0 for number in range(3000)}})
        ChatRequest.parse({**CHAT, "one_more": 0})
    (record,) = caplog.records
    assert record.getMessage().endswith("'unknown_1003', 'unknown_1004' and 2991 more")
    assert len(record.getMessage()) < 500
    assert sum(map(len, fields._warned_keys)) < 100_000


def test_unknown_fields_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trunkline.api"):
        for _ in range(2):
            ChatRequest.parse({**CHAT, "first_unknown": 1, "second_unknown\n": 2})
    (record,) = caplog.records
    assert "'first_unknown', 'second_unknown\\n'" in record.getMessage()


def test_full_queue_says_when_to_come_back() -> None:
    response = error_response(QueueFull("requests", "the queue", 5, 4, retry_after=2.2))
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    error = json.loads(bytes(response.body))["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert error["message"].endswith("Please try again in 2.2 seconds.")
    soon = error_response(QueueFull("tokens", "the queue", 5, 4, retry_after=0.1))
    assert soon.headers["retry-after"] == "1", "whole seconds, and not at once"

"""Cancelling by id: whoever asked gets a clear end, the engine forgets the request, and nobody cancels what is another's."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL, Server, metrics, wait_idle
from trunkline.api.client import Inbox
from trunkline.api.generation import Generation
from trunkline.api.metrics import Metrics
from trunkline.api.running_requests import RunningRequests
from trunkline.api.tenants import Caller

pytestmark = pytest.mark.slow  # it starts a server

ENDLESS = {"model": MODEL, "ignore_eos": True, "temperature": 0, "max_tokens": 8_000}
PROMPT = {**ENDLESS, "prompt": "hello"}
CHAT = {**ENDLESS, "messages": [{"role": "user", "content": "hello"}]}
KEYS = {"a": "key-a", "b": "key-b", "root": "root"}


@pytest.fixture(scope="module", params=["key", "all"])
def shop(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A place for one request only: others wait."""
    flags = ["--api-key", "key-a", "key-b", "--admin-api-key", "root", "--max-num-seqs", "1"]
    flags += ["--cache-sharing", request.param, "--kv-cache-memory", "16MiB", "--generation-config", "vllm"]
    with Server(tiny, "--served-model-name", MODEL, *flags) as server:
        yield server.wait_ready()


@pytest.fixture
async def http(shop: Server) -> AsyncIterator[httpx.AsyncClient]:
    wait_idle(shop.url)
    async with httpx.AsyncClient(base_url=shop.url, timeout=60) as client:
        yield client
    wait_idle(shop.url)


def sent(name: str, who: str = "a") -> dict[str, str]:
    return {"x-request-id": name, "x-api-key": KEYS[who]}


def send(http: httpx.AsyncClient, body: dict[str, Any], name: str, who: str = "a") -> "asyncio.Task[httpx.Response]":
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return asyncio.create_task(http.post(path, json=body, headers=sent(name, who)))


async def cancel(http: httpx.AsyncClient, name: str, who: str = "a") -> httpx.Response:
    return await http.post(f"/v1/requests/{name}/cancel", headers={"x-api-key": KEYS[who]})


async def wait_for(http: httpx.AsyncClient, *, running: int = 1, waiting: int = 0) -> dict[str, Any]:
    """The queue, once so many requests run and wait."""
    while True:
        queue: dict[str, Any] = (await http.get("/v1/queue", headers={"x-api-key": "root"})).json()
        if (len(queue["running"]), len(queue["waiting"])) == (running, waiting):
            return queue


def check_cancelled(response: httpx.Response) -> None:
    assert response.status_code == 499, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("request_cancelled", "request_cancelled")


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completion", "chat"])
async def test_a_running_request(http: httpx.AsyncClient, body: dict[str, Any], shop: Server) -> None:
    asking = send(http, body, "job/1:")
    queue = await wait_for(http)
    response = await cancel(http, "job/1:")
    assert response.status_code == 200, response.text
    (told,) = response.json()["cancelled"]
    assert told["request_id"] == "job/1:"
    assert queue["running"][0]["request_id"].startswith(told["id"])
    assert told["tenant"] == queue["running"][0]["tenant"]
    assert (told["prompt_tokens"], 0 <= told["completion_tokens"] < 8000) == (
        queue["running"][0]["prompt_tokens"],
        True,
    )
    check_cancelled(await asking)
    assert wait_idle(shop.url)['trunkline:kv_cache_pages{owner="lease"}'] == 0
    assert (await cancel(http, "job/1:")).status_code == 404, "it has ended"


async def test_a_stream(http: httpx.AsyncClient) -> None:
    lines: list[str] = []
    async with http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}, headers=sent("s")) as response:
        async for line in response.aiter_lines():
            if line and not lines:
                assert (await cancel(http, response.headers["x-request-id"])).json()["cancelled"][0][
                    "completion_tokens"
                ] > 0
            lines += [line] if line else []
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "request_cancelled"
    assert "data: [DONE]" not in lines


async def test_a_waiting_request(http: httpx.AsyncClient) -> None:
    first = send(http, PROMPT, "first")
    await wait_for(http)
    second = send(http, {**CHAT, "stream": True}, "second")
    await wait_for(http, waiting=1)
    (told,) = (await cancel(http, "second")).json()["cancelled"]
    assert (told["request_id"], told["completion_tokens"]) == ("second", 0)
    check_cancelled(await second)  # nothing was sent yet: an ordinary error
    await wait_for(http)
    await cancel(http, "first")
    check_cancelled(await first)


async def test_all_of_its_choices(http: httpx.AsyncClient) -> None:
    asking = send(http, {**PROMPT, "prompt": ["hello", "world"], "n": 2}, "many")
    await wait_for(http, waiting=3)
    (told,) = (await cancel(http, "many")).json()["cancelled"]
    assert told["prompt_tokens"] > 0
    check_cancelled(await asking)
    await wait_for(http, running=0)


@pytest.mark.parametrize("place", ["queue", "answer"])
async def test_its_other_names(http: httpx.AsyncClient, place: str) -> None:
    asking = send(http, PROMPT, "named")
    queued = (await wait_for(http))["running"][0]["request_id"]
    name = queued if place == "queue" else queued.rpartition("-")[0]
    for wrong in (name[:-1], name + "x", name.split("-")[0], "-", f"{name}-x"):
        assert (await cancel(http, wrong)).status_code == 404
    assert (await cancel(http, name)).status_code == 200
    check_cancelled(await asking)


async def test_one_id_for_several_requests(http: httpx.AsyncClient) -> None:
    asking = [send(http, PROMPT, "same") for _ in range(2)]
    other = send(http, PROMPT, "other")
    await wait_for(http, waiting=2)
    assert len((await cancel(http, "same")).json()["cancelled"]) == 2
    for response in asking:
        check_cancelled(await response)
    await wait_for(http)
    assert not other.done()
    await cancel(http, "other")
    check_cancelled(await other)


async def test_nobody_cancels_what_is_anothers(http: httpx.AsyncClient) -> None:
    """Nor learns that it is there. Not even if the keys share one cache."""
    asking = send(http, PROMPT, "mine", "a")
    queued = (await wait_for(http))["running"][0]["request_id"]
    for name in ("mine", queued):
        foreign, unknown = await cancel(http, name, "b"), await cancel(http, "nothing", "b")
        assert (foreign.status_code, unknown.status_code) == (404, 404)
        assert foreign.json()["error"]["code"] == unknown.json()["error"]["code"] == "request_not_found"
        assert foreign.json()["error"]["message"].replace(name, "nothing") == unknown.json()["error"]["message"]
    assert (await http.post("/v1/requests/mine/cancel")).status_code == 401
    assert not asking.done()
    assert (await cancel(http, "mine", "root")).status_code == 200
    check_cancelled(await asking)


async def test_it_is_counted(http: httpx.AsyncClient, shop: Server) -> None:
    sample = 'trunkline:request_failures_total{code="request_cancelled"}'
    before = metrics(shop.url).get(sample, 0)
    asking = send(http, PROMPT, "counted")
    await wait_for(http)
    await cancel(http, "counted")
    await asking
    assert metrics(shop.url)[sample] == before + 1


async def test_it_is_described(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert "post" in document["paths"]["/v1/requests/{request_id}/cancel"]
    assert {"Cancelled", "CancelledRequest"} <= document["components"]["schemas"].keys()


class NoEngine:
    """The little of an EngineClient that an inbox needs."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}

    def send(self, messages: object) -> None:
        pass


def test_what_has_ended_cannot_be_cancelled() -> None:
    """The engine is done with it, only nobody has read that yet: it must not get an error after its end."""
    running, caller = RunningRequests(), Caller("", is_admin=True)
    inbox = Inbox(NoEngine(), ["r"])  # type: ignore[arg-type]
    observer = running.observe(Metrics("m"), "name", "cmpl-1", caller)
    generation = Generation(inbox, {}, prompts=[[1]], n=1, observer=observer)
    inbox._forget("r")
    assert running.cancel("name", caller) == []
    generation.close()
    assert not running._requests

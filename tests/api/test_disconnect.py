"""Clients that go away: the engine forgets their requests, and the others never notice. Real sockets throughout."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL, Server, metrics, wait_idle
from trunkline.api.app import create_app
from trunkline.api.launch import bind, make_http_server
from trunkline.api.service import Service
from trunkline.async_llm import AsyncLLM
from trunkline.config import ApiConfig, engine_config
from trunkline.models.checkpoint import builtin_model

ENDLESS = {"model": MODEL, "max_tokens": 8_000, "ignore_eos": True, "temperature": 0}


def post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def open_stream(port: int, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(path, body))
    await writer.drain()
    return reader, writer


async def cut(writer: asyncio.StreamWriter) -> None:
    """Go away without a word, as a killed client does."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def port_of(server: Server) -> int:
    return int(server.url.rsplit(":", 1)[1])


async def wait_running(server: Server, number: int) -> None:
    while metrics(server.url)['trunkline:num_requests_running{model_name="tiny"}'] < number:
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_request_ends_when_its_client_goes(server: Server, stream: bool, n: int) -> None:
    before = wait_idle(server.url)
    body = {**ENDLESS, "prompt": "hello", "stream": stream, "n": n}
    reader, writer = await open_stream(port_of(server), "/v1/completions", body)
    if stream:
        await reader.readuntil(b'"text":')
    await wait_running(server, n)
    await cut(writer)
    after = wait_idle(server.url)
    assert after['trunkline:kv_cache_pages{owner="lease"}'] == 0
    aborted = 'trunkline:request_success_total{finished_reason="abort"}'
    assert after[aborted] == before.get(aborted, 0) + n


async def test_closing_the_generator_is_enough(server: Server) -> None:
    """What an openai client does when its caller breaks out of the loop."""
    wait_idle(server.url)
    body = {**ENDLESS, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async for _ in response.aiter_lines():
            break
    wait_idle(server.url)


class InProcess:
    """HTTP in this process, the engine in its own: the engine can be asked to check itself."""

    def __init__(self, llm: AsyncLLM) -> None:
        config = ApiConfig(port=0, served_model_names=(MODEL,), generation_config="vllm")
        self.llm = llm
        self.listener = bind(config.host, config.port)
        self.port: int = self.listener.getsockname()[1]
        self.http = make_http_server(create_app(Service(config, llm)), verbose=False)


@pytest.fixture(params=["tiny", pytest.param("built-in", marks=pytest.mark.real)])
async def in_process(tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[InProcess]:
    model = builtin_model() if request.param == "built-in" else str(tiny)
    config = engine_config(model, num_pages=100, max_num_seqs=64, max_model_len=512)
    async with AsyncLLM.of(config) as llm:
        server = InProcess(llm)
        serving = asyncio.create_task(server.http.serve(sockets=[server.listener]))
        yield server
        server.http.should_exit = True
        await serving


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [100])
async def test_flood_of_streams_half_of_them_cut(in_process: InProcess, num_streams: int) -> None:
    """More streams than sequences, and too few pages for all of them: queueing, preemption and aborts all meet."""
    choose = random.Random(7)
    stem = "the same words stand at the front of every prompt here, and then "
    prompts = [f"{stem}comes number {number % 40}, which differs" for number in range(num_streams)]
    bodies = [
        {"model": MODEL, "prompt": prompt, "max_tokens": 48, "ignore_eos": True, "temperature": 0, "stream": True}
        for prompt in prompts
    ]
    leaving = set(choose.sample(range(num_streams), num_streams // 2))

    async def run(number: int) -> str | None:
        reader, writer = await open_stream(in_process.port, "/v1/completions", bodies[number])
        try:
            if number in leaving:
                with contextlib.suppress(asyncio.IncompleteReadError):  # drafts make few chunks of many tokens
                    await reader.readexactly(choose.choice((0, 1, 500, 2000, 6000)))
                return None
            return await read_text(reader)
        finally:
            await cut(writer)

    texts = await asyncio.gather(*(run(number) for number in range(num_streams)))
    expected = {prompt: await run_alone(in_process, prompt) for prompt in set(prompts)}
    for number, text in enumerate(texts):
        if number not in leaving:
            assert text == expected[prompts[number]], f"stream {number} differs from the same request alone"
    stats = await idle_stats(in_process.llm)
    assert sum(stats["num_preemptions_total"].values()) > 0
    pages = stats["pages"]
    assert pages["free"] + pages["tree"] == sum(pages.values()), f"pages are held by nobody: {pages}"
    assert await in_process.llm.call("check") == {"ok": True}
    assert not in_process.llm.client._inboxes  # type: ignore[union-attr]


async def read_text(reader: asyncio.StreamReader) -> str:
    """The text of a stream, up to its [DONE]."""
    received = (await reader.readuntil(b"data: [DONE]")).decode()
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(event["choices"][0]["text"] for event in events)


async def run_alone(server: InProcess, prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "ignore_eos": True, "temperature": 0, "stream": True}
    reader, writer = await open_stream(server.port, "/v1/completions", body)
    try:
        return await read_text(reader)
    finally:
        writer.close()


async def idle_stats(llm: AsyncLLM) -> dict[str, Any]:
    while True:
        stats = await llm.call("stats")
        if not stats["running"] and not stats["waiting"]:
            return stats

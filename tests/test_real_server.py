"""The built-in model behind real sockets: what README promises, and what the prefix tree saves."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Literal

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel

from benchmarks.server import serve
from trunkline.bench.cli import make_texts
from trunkline.bench.runner import Server
from trunkline.bench.workloads import SCHEMA, make_workloads

pytestmark = [pytest.mark.real, pytest.mark.slow]

PAGE_SIZE = 16


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as address:
        yield address


def metric(url: str, name: str) -> float:
    """The value of a counter or gauge without labels, or with the model's name only."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found = re.search(rf"^trunkline:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, f"there is no metric {name}"
    return float(found[1])


def test_sensible_english_and_then_all_whole_pages_from_the_cache(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answers = [
        client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=32)  # type: ignore[arg-type]
        for _ in range(2)
    ]
    assert [answer.choices[0].message.content for answer in answers] == ["The capital of France is Paris."] * 2
    cold, warm = (answer.usage for answer in answers)
    assert cold is not None and warm is not None
    assert cold.prompt_tokens_details is not None and warm.prompt_tokens_details is not None
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert warm.prompt_tokens_details.cached_tokens == (warm.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE > 0


def test_rag_workload_computes_each_shared_part_once(url: str) -> None:
    """W2: 32 prompts over one system prompt of 1,024 tokens and 8 documents of 128, 8 at a time."""
    (workload,) = make_workloads("W2", make_texts(None), seed=7)

    async def run() -> None:
        async with Server(url) as server:
            outcomes = (await server.run(workload, await server.model())).outcomes
            assert all(outcome.error is None for _, outcome in outcomes)

    before = metric(url, "prompt_tokens_computed_total")
    asyncio.run(run())
    assert metric(url, "prompt_tokens_computed_total") - before <= 1024 + 8 * 144 + 32 * 64
    assert metric(url, "num_requests_running") == metric(url, "num_requests_waiting") == 0


def test_extraction_into_a_schema(url: str) -> None:
    """W4: sixteen tickets, 8 at a time; whatever the model says in them, each is valid, or was cut."""
    workload, _ = make_workloads("W4", make_texts(None), seed=7)

    async def run() -> None:
        async with Server(url) as server:
            outcomes = (await server.run(workload, await server.model())).outcomes
        assert [outcome.error for _, outcome in outcomes] == [None] * 16
        whole = [outcome.text for _, outcome in outcomes if outcome.finish_reason == "stop"]
        assert len(whole) > 8
        for text in whole:
            jsonschema.validate(json.loads(text), SCHEMA)

    asyncio.run(run())


def test_openais_client_parses_into_a_model(url: str) -> None:
    class Town(BaseModel):
        name: Literal["Paris", "London", "Rome"]
        capital_of: Literal["France", "England", "Italy"]

    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Which town is the capital of France? Answer in JSON."}],
        response_format=Town,
        temperature=0,
        max_tokens=64,
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None and (parsed.name, parsed.capital_of) == ("Paris", "France")

"""A path that nobody has is answered with what to send instead, and that is there."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.api.test_app import connect, make_service
from trunkline.api.unknown_routes import _ADVICE

MIGRATING = Path(__file__).parents[2] / "docs" / "migrating.md"


@pytest.fixture
async def opened() -> AsyncIterator[httpx.AsyncClient]:
    async with connect(make_service()) as client:
        yield client


async def told(client: httpx.AsyncClient, path: str) -> str:
    answer = await client.post(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    message: str = answer.json()["error"]["message"]
    beginning, end = f"Unknown request URL: POST {path}. ", "The API lies under /v1; /docs lists it."
    assert message.startswith(beginning)
    assert message.endswith(end)
    return message.removeprefix(beginning).removesuffix(end).strip()


@pytest.mark.parametrize(
    ("path", "here"),
    [
        ("/reset_prefix_cache", "POST /v1/cache/flush does this here."),
        ("/slots/3", "GET /v1/queue does this here; there are no slots, only requests that run or wait."),
        ("/generate", "POST /v1/completions does this here."),
        (
            "/v1/batches/b-1/cancel",
            "Files and batches are not there: 'trunkline run-batch' answers a file of requests.",
        ),
        ("/v1/chat/completion", "Did you mean POST /v1/chat/completions?"),
        ("/chat/completions", "Did you mean POST /v1/chat/completions?"),
        ("/v1/v1/models", "Did you mean GET /v1/models?"),
        ("/V1/Embedding", "Did you mean POST /v1/embeddings?"),
        ("/v1/nothing-like-it", ""),
        ("/filesystem", ""),
        ("/v1/chat/completions" * 50, ""),
    ],
)
async def test_what_to_send_instead(opened: httpx.AsyncClient, path: str, here: str) -> None:
    assert await told(opened, path) == here


async def test_all_that_the_page_about_moving_lists_is_named_in_the_answer(opened: httpx.AsyncClient) -> None:
    table = MIGRATING.read_text(encoding="utf-8").split("## Routes")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "`/" in line]
    num_checked = 0
    for *theirs, here in rows:
        route = re.search(r"/[\w/{]+", here)
        for path in re.findall(r"`(/[^`]+)`", " ".join(theirs)):
            if route and (await opened.post(path)).status_code == 404:
                assert route[0].split("{")[0] in await told(opened, path), path
                num_checked += 1
    assert num_checked >= 5


async def test_what_is_named_is_there(opened: httpx.AsyncClient) -> None:
    paths = (await opened.get("/openapi.json")).json()["paths"]
    there = {f"{method.upper()} {re.sub('{.*?}', '{}', path)}" for path, item in paths.items() for method in item}
    named = {named for told in _ADVICE.values() for named in re.findall(r"(?:GET|POST) [\w/{}]+", told)}
    assert len(named) > 5
    assert {re.sub("{.*?}", "{}", one) for one in named} <= there

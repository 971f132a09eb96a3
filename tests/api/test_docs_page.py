"""/docs is whole: every route and field, no other host, no script, and a policy that lets its own style through."""

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from html import unescape

import httpx
import pytest

from tests.api.test_app import connect, make_service
from trunkline.api.protocol import ChatRequest


@pytest.fixture(params=[True, False], ids=["dashboard", "no dashboard"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(make_service(dashboard=request.param, api_keys=("sk-secret",))) as client:
        yield client


async def test_every_route_and_every_field_is_there(opened: httpx.AsyncClient) -> None:
    page = (await opened.get("/docs")).text
    document = (await opened.get("/openapi.json")).json()
    told = set(re.findall(r"<code>((?:GET|POST|DELETE) [^<]+)</code>", page))
    there = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
    assert told == there
    (of_chats,) = re.findall(r'<div id="ChatRequest">(.*?)</div>', page, re.DOTALL)
    assert set(ChatRequest.model_fields) <= set(re.findall(r"<td><code>(\w+)</code></td>", of_chats))
    assert "<td><code>messages</code></td><td>list of" in of_chats
    places = re.findall(r'id="([^"]+)"', page)
    assert len(places) == len(set(places))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(places) == document["components"]["schemas"].keys()


async def test_nothing_is_loaded_and_no_script_runs(opened: httpx.AsyncClient) -> None:
    response = await opened.get("/docs")
    assert "://" not in response.text
    assert not re.search(r"<(script|link|img|iframe)|\son\w+=|\sstyle=|\ssrc=|@import|url\(", response.text)
    assert set(re.findall(r'href="([^#"][^"]*)"', response.text)) == {"openapi.json"}
    (style,) = re.findall(r"<style>(.*)</style>", response.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(unescape(style).encode()).digest()).decode()
    policy = response.headers["content-security-policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_its_links_hold_with_a_slash_at_the_end(opened: httpx.AsyncClient) -> None:
    moved = await opened.get("/docs/", follow_redirects=True)
    assert (moved.url.path, moved.status_code) == ("/docs", 200)
    assert (await opened.get("/redoc")).status_code == 404

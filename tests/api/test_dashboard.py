"""The dashboard's files and its feed: what is served to whom, what it costs, and that nothing comes from elsewhere.

How it looks and works in a browser is in test_dashboard_browser.py.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL, PATIENCE
from tests.api.test_app import connect
from tests.api.test_cache_routes import NotingEngine, key, make_service
from trunkline.api.dashboard_feed import MAX_LISTED, Coalesced
from trunkline.api.dashboard_files import FOLDER
from trunkline.api.service import Service
from trunkline.errors import EngineDead
from trunkline.models.tokenizer import Tokenizer

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(path.name for path in FOLDER.iterdir())
STATS = {
    "kv_cache_usage": 0.25,
    "pages": {"free": 32, "tree": 24, "lease": 7, "copy": 1},
    "pinned_pages": 2,
    "prefix_cache_queries_total": 100,
    "prefix_cache_hits_total": {"device": 40},
    "evicted_pages_total": {"device": 3},
    "tier_usage": {"device": 0.5},
}
ENTRY = {"tenant": "", "seconds": 3.0, "prompt_tokens": 20, "cached_tokens": 16}


@pytest.fixture
def engine() -> NotingEngine:
    engine = NotingEngine()
    engine.replies["stats"] = STATS
    engine.replies["queue"] = {
        "waiting": [{**ENTRY, "request_id": "w", "why": "all 1 places are taken"}],
        "running": [
            {**ENTRY, "request_id": "r", "queue_seconds": 1.0, "prompt_tokens_computed": 16, "generated_tokens": 0}
        ],
        "num_waiting": 1,
        "num_running": 1,
    }
    return engine


@pytest.fixture
def service(engine: NotingEngine, tokenizer: Tokenizer) -> Service:
    return make_service(engine, tokenizer)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(service) as client:
        yield client


@pytest.fixture
def keyed_service(engine: NotingEngine, tokenizer: Tokenizer) -> Service:
    return make_service(engine, tokenizer, api_keys=("a", "b"), admin_api_key="root")


@pytest.fixture
async def keyed(keyed_service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(keyed_service) as client:
        yield client


def tenant(service: Service, name: str) -> str:
    caller = service.keys.caller(name)
    assert caller is not None
    return caller.tenant


def text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------- the files


async def test_a_browser_gets_the_page_and_others_where_things_are(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.text == text("index.html")
    other = (await http.get("/")).json()
    assert (other["name"], other["api"], other["docs"]) == ("Trunkline", "/v1", "/docs")
    assert page.headers["vary"] == "Accept", "one address, two answers"


@pytest.mark.parametrize(("path", "way"), [("/dashboard", "./"), ("/dashboard/", "../")])
async def test_its_name_leads_to_the_page(http: httpx.AsyncClient, path: str, way: str) -> None:
    """Also behind a proxy that puts a path before it."""
    moved = await http.get(path, headers=BROWSER)
    assert (moved.status_code, moved.headers["location"]) == (308, way)
    page = await http.get(path, headers=BROWSER, follow_redirects=True)
    assert (page.url.path, page.text) == ("/", text("index.html"))


@pytest.mark.parametrize("name", FILES)
async def test_every_file_has_its_type_and_the_policy(http: httpx.AsyncClient, name: str) -> None:
    types = {"html": "text/html", "css": "text/css", "js": "javascript", "svg": "image/svg+xml"}
    response = await http.get(f"/dashboard/{name}")
    assert response.status_code == 200
    assert types[name.rpartition(".")[2]] in response.headers["content-type"]
    assert response.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_an_unchanged_file_is_not_sent_again(http: httpx.AsyncClient) -> None:
    for path in ("/", "/dashboard/app.js"):
        first = await http.get(path, headers=BROWSER)
        assert first.headers["cache-control"] == "no-cache"
        again = await http.get(path, headers={**BROWSER, "if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "%2fetc/passwd", "nothing.js"])
async def test_nothing_else_is_served(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(f"/dashboard/{path}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


async def test_it_can_be_switched_off(engine: NotingEngine, tokenizer: Tokenizer) -> None:
    async with connect(make_service(engine, tokenizer, dashboard=False)) as http:
        for path in ("/", "/dashboard", "/dashboard/app.js", "/v1/dashboard"):
            assert (await http.get(path, headers=BROWSER)).status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host(name: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"')]*", text(name)))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "that one is a name, and nothing is loaded from it"


def test_nothing_in_the_page_needs_what_the_policy_forbids() -> None:
    page = text("index.html")
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []
    scripts = "".join(text(name) for name in FILES if name.endswith(".js"))
    assert re.findall(r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write", scripts) == []


def test_all_that_is_referred_to_is_there() -> None:
    page = text("index.html")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:aria-labelledby|aria-describedby|aria-controls|for)="([^"]+)"|href="#([^"]+)"', page):
        assert set(filter(None, target)) <= set(ids), target
    assert set(re.findall(r'(?:src|href)="dashboard/([^"]+)"', page)) <= set(FILES)
    for name in FILES:
        if name.endswith(".js"):
            wanted = set(re.findall(r'\$\("([^"]+)"\)', text(name)))
            assert wanted <= set(ids), f"{name} looks for {wanted - set(ids)}"
            assert set(re.findall(r'from "\./([^"]+)"', text(name))) <= set(FILES)


# ---------------------------------------------------------------- the key


async def test_files_need_no_key_and_data_do(keyed: httpx.AsyncClient) -> None:
    assert (await keyed.get("/", headers=BROWSER)).status_code == 200
    assert (await keyed.get("/dashboard/app.js")).status_code == 200
    for headers in ({}, key("wrong")):
        assert (await keyed.get("/v1/dashboard", headers=headers)).status_code == 401
    assert (await keyed.get("/v1/dashboard", headers=key("a"))).status_code == 200


async def test_tenants_see_their_own(keyed: httpx.AsyncClient, keyed_service: Service, engine: NotingEngine) -> None:
    names = {name: tenant(keyed_service, name) for name in ("a", "b", "root")}
    facts: dict[str, Any] = {
        "queue_seconds": 0.0,
        "prefill_seconds": 0.1,
        "first_token_seconds": 0.1,
        "seconds": 1.0,
        "error": None,
    }
    numbers = {"prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 1}
    for name in ("a", "b"):
        keyed_service.running.history.add(
            names[name], id=f"cmpl-{name}", cache_reasons={}, finish_reasons={}, **facts, **numbers
        )
    for asking, seen in (("a", ["cmpl-a"]), ("b", ["cmpl-b"]), ("root", ["cmpl-a", "cmpl-b"])):
        told = (await keyed.get("/v1/dashboard", headers=key(asking))).json()
        assert [request["id"] for request in told["finished"]] == seen
        assert told["totals"]["requests"] == sum(bucket["requests"] for bucket in told["history"]) == len(seen)
        assert (told["tenant"], told["is_admin"]) == (names[asking], asking == "root")
        assert {owner["tenant"] for owner in told["owners"]} == (
            set(names.values()) if asking == "root" else {names[asking]}
        )
    asked = {args["tenant"] for method, args in engine.asked if method == "queue"}
    assert asked == {names["a"], names["b"], None}


async def test_only_an_admin_looks_at_others(keyed: httpx.AsyncClient, keyed_service: Service) -> None:
    other = tenant(keyed_service, "b")
    assert (await keyed.get("/v1/dashboard", params={"tenant": other}, headers=key("a"))).status_code == 403
    told = (await keyed.get("/v1/dashboard", params={"tenant": other[:8]}, headers=key("root"))).json()
    assert [owner["tenant"] for owner in told["owners"]] == [other]


# ---------------------------------------------------------------- the feed


async def test_what_is_told(http: httpx.AsyncClient, service: Service) -> None:
    told = (await http.get("/v1/dashboard")).json()
    assert told["started_at"] == service.created
    assert told["server"]["models"] == ["m"] and told["server"]["num_pages"] == 64
    pages = {name: told["memory"][name] for name in ("free", "own", "held", "evictable", "pinned")}
    assert pages == {"free": 32, "own": 8, "held": 8, "evictable": 16, "pinned": 2}
    assert sum(pages[name] for name in ("free", "own", "held", "evictable")) == 64
    (waiting,), (running,) = told["waiting"], told["running"]
    assert waiting["why"] == "all 1 places are taken"
    assert (running["queue_seconds"], running["prefill_seconds"]) == (1.0, None)
    assert (told["num_waiting"], told["num_running"]) == (1, 1)


async def test_the_engine_is_asked_once_for_all_who_look_on(http: httpx.AsyncClient, engine: NotingEngine) -> None:
    answers = await asyncio.gather(*(http.get("/v1/dashboard") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(method for method, _ in engine.asked) == ["queue", "stats", "tenants"]
    assert ("queue", {"tenant": None, "limit": MAX_LISTED}) in engine.asked


async def test_the_tree_is_said_to_change_when_it_does(service: Service, engine: NotingEngine) -> None:
    async def changes(**stats: Any) -> int:
        engine.replies["stats"] = {**STATS, **stats}
        async with connect(service) as http:
            told: int = (await http.get("/v1/dashboard")).json()["tree_changes"]
            return told

    first = await changes()
    assert await changes() == first
    assert await changes(evicted_pages_total={"device": 4}) != first
    assert await changes(prefix_cache_queries_total=101) != first


@pytest.mark.parametrize("query", ["since=yesterday", "since=-1", "finished_after=1.5", f"finished_after={2**60}"])
async def test_an_address_that_cannot_be_read(http: httpx.AsyncClient, query: str) -> None:
    response = await http.get(f"/v1/dashboard?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


async def test_without_an_engine_it_says_why(service: Service, engine: NotingEngine) -> None:
    async with connect(service) as http:
        engine.dead = EngineDead("The engine process ended (signal SIGKILL).")
        assert (await http.get("/v1/dashboard")).json()["error"]["code"] == "engine_dead"
        engine.dead, service.llm.ready = None, None
        assert (await http.get("/v1/dashboard")).json()["error"]["code"] == "model_loading"
        assert (await http.get("/", headers=BROWSER)).status_code == 200, "the page says so itself"


class Asked:
    """Counts how often it is asked; answers when told to."""

    def __init__(self) -> None:
        self.times = 0
        self.may_answer = asyncio.Event()
        self.now = 0.0

    async def ask(self, _key: str | None) -> int:
        self.times += 1
        number = self.times
        await self.may_answer.wait()
        return number

    def clock(self) -> float:
        return self.now


async def test_an_answer_is_kept_for_a_while_and_no_longer() -> None:
    asked = Asked()
    asked.may_answer.set()
    answers = Coalesced(asked.ask, 1.0, asked.clock)
    assert [await answers.get(None), await answers.get(None), await answers.get("acme")] == [1, 1, 2]
    asked.now = 0.99
    assert await answers.get(None) == 1
    asked.now = 1.0
    assert await answers.get(None) == 3


async def test_who_goes_away_takes_the_answer_from_nobody() -> None:
    asked = Asked()
    answers = Coalesced(asked.ask, 1.0, asked.clock)
    gone, stays = (asyncio.ensure_future(answers.get(None)) for _ in range(2))
    while not asked.times:
        await asyncio.sleep(0)
    gone.cancel()
    asked.now = 5.0
    late = asyncio.ensure_future(answers.get(None))
    asked.may_answer.set()
    assert await stays == await late == 1, "one on its way is shared, however long it takes"


async def test_a_failure_is_not_kept() -> None:
    times = 0

    async def ask(_key: str | None) -> int:
        nonlocal times
        times += 1
        if times == 1:
            raise EngineDead("for now")
        return times

    answers = Coalesced(ask, 1.0, lambda: 0.0)
    with pytest.raises(EngineDead):
        await answers.get(None)
    assert await answers.get(None) == 2


# ---------------------------------------------------------------- a real server


@pytest.mark.slow
async def test_the_life_of_a_request(server: Any) -> None:
    """It runs, and its first token is seen; it ends, and its stages are told; sent again, it hits."""
    body = {"model": MODEL, "prompt": "a dashboard is for looking at requests as they come and go", "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
        before = (await http.get("/v1/dashboard")).json()

        async def until(what: str, found: Any) -> Any:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                told = (await http.get("/v1/dashboard", params={"finished_after": newest(before)})).json()
                if (result := found(told)) is not None:
                    return result
            raise AssertionError(f"{what} was never told")

        async with http.stream("POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 4000}) as stream:
            lines = stream.aiter_lines()  # the stream ends with it
            await anext(lines)
            running = await until(
                "the first token", lambda told: next((r for r in told["running"] if r["prefill_seconds"]), None)
            )
        assert 0 < running["queue_seconds"] + running["prefill_seconds"] <= running["seconds"]
        cut = await until("its end", lambda told: next(iter(told["finished"]), None))
        assert (cut["finish_reasons"], cut["cached_tokens"]) == ({"abort": 1}, 0)
        again = (await http.post("/v1/completions", json={**body, "max_tokens": 2})).json()
        done = await until("the hit", lambda told: next((r for r in told["finished"] if r["id"] == again["id"]), None))
        assert done["cached_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert 0 < done["queue_seconds"] + done["prefill_seconds"] <= done["first_token_seconds"] <= done["seconds"]
        after = await until("the sums", lambda told: told if told["totals"]["requests"] > 1 else None)
        assert after["totals"]["cached_tokens"] - before["totals"]["cached_tokens"] == done["cached_tokens"]
        assert after["tree_changes"] != before["tree_changes"]


def newest(told: dict[str, Any]) -> int:
    return max((request["number"] for request in told["finished"]), default=0)

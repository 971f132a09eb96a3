"""The routes of the cache and the queue, with an engine that only notes what it is asked: who may ask what, and how it is read.

What they answer of a real engine is in test_cache_live.py.
"""

import time
from array import array
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.api.test_app import connect
from tests.stub import make_ready
from tests.tiny import CHAT_TEMPLATE, VOCAB_SIZE
from trunkline.api.cache_answers import rounded
from trunkline.api.cache_routes import ROUTES
from trunkline.api.part_cache import PartCache
from trunkline.api.service import Service
from trunkline.api.template import ChatTemplate
from trunkline.async_llm import AsyncLLM
from trunkline.config import ApiConfig, engine_config
from trunkline.errors import EngineDead, shown
from trunkline.messages import CacheReport
from trunkline.models.tokenizer import Tokenizer

PROMPT = {"prompt": "hello world and the rest of it"}
FLUSHED = {"pages": 3, "tier_pages": 2}
READY = make_ready(max_model_len=512, vocab_size=VOCAB_SIZE)


class NotingEngine:
    """In the place of an EngineClient: answers calls with what `replies` has, and notes their arguments."""

    def __init__(self) -> None:
        self.dead: EngineDead | None = None
        self.asked: list[tuple[str, dict[str, Any]]] = []
        report = CacheReport(prompt_tokens=20, cached_tokens=0, reason="unseen")
        self.replies: dict[str, Any] = {
            "explain": msgspec.to_builtins(report, builtin_types=(bytes,)),
            "flush": FLUSHED,
            "pins": [],
            "unpin": True,
            "tenants": {},
            "queue": {"waiting": [], "running": []},
            "tree": {"namespaces": [], "top": [], "reuse_curve": []},
        }

    async def call(self, method: str, **args: Any) -> Any:
        if self.dead is not None:
            raise self.dead
        self.asked.append((method, args))
        return self.replies[method]


@pytest.fixture
def engine() -> NotingEngine:
    return NotingEngine()


def make_service(engine: NotingEngine, tokenizer: Tokenizer, **config: Any) -> Service:
    llm = AsyncLLM.of(engine_config("nowhere"))
    llm.client, llm.ready = engine, READY  # type: ignore[assignment]
    llm.tokenizer, llm._longest_token, llm._parts = tokenizer, 10, PartCache(tokenizer)
    llm.template = ChatTemplate(CHAT_TEMPLATE, special_tokens={})
    return Service(ApiConfig(served_model_names=("m",), **config), llm)


@pytest.fixture
async def http(engine: NotingEngine, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(make_service(engine, tokenizer)) as client:
        yield client


@pytest.fixture
async def keyed(engine: NotingEngine, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    service = make_service(engine, tokenizer, api_keys=("a", "b"), admin_api_key="root")
    async with connect(service) as client:
        yield client


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def all_requests() -> Iterator[tuple[str, str, Any]]:
    for route in ROUTES:
        path = route.path.replace("{pin_id}", "1")
        yield route.method, path, PROMPT if route.bodies and "flush" not in path else None


async def test_every_route_wants_a_key(keyed: httpx.AsyncClient) -> None:
    for method, path, body in all_requests():
        assert (await keyed.request(method, path, json=body)).status_code == 401, path


async def test_dead_engine_is_503(http: httpx.AsyncClient, engine: NotingEngine) -> None:
    engine.dead = EngineDead("The engine process ended (signal SIGKILL).")
    for method, path, body in all_requests():
        response = await http.request(method, path, json=body)
        assert response.status_code == 503, path
        assert response.json()["error"]["code"] == "engine_dead"
        assert "SIGKILL" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "1"


async def test_engine_that_dies_while_it_is_asked(http: httpx.AsyncClient, engine: NotingEngine) -> None:
    async def die(_method: str, **_args: Any) -> None:
        raise EngineDead("The engine process ended (exit code 2).")

    engine.call = die  # type: ignore[method-assign, assignment]
    for method, path, body in all_requests():
        if "warm" not in path:
            assert (await http.request(method, path, json=body)).status_code == 503, path


async def test_loading_is_503(tokenizer: Tokenizer, engine: NotingEngine) -> None:
    service = make_service(engine, tokenizer)
    service.llm.ready = None
    async with connect(service) as client:
        for method, path, body in all_requests():
            response = await client.request(method, path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "model_loading")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/cache/tree"), ("GET", "/v1/cache/pins"), ("GET", "/v1/queue")]
)
async def test_who_sees_what(keyed: httpx.AsyncClient, engine: NotingEngine, method: str, path: str) -> None:
    tenants = []
    for name in ("a", "b", "root"):
        assert (await keyed.request(method, path, headers=key(name))).status_code == 200
        tenants.append(engine.asked[-1][1]["tenant"])
    first, second, everybody = tenants
    assert first != second
    assert len(first) == len(second) == 32
    assert everybody is None
    assert (await keyed.request(method, path, headers=key("a"), params={"tenant": first})).status_code == 200
    num_asked = len(engine.asked)
    refused = await keyed.request(method, path, headers=key("a"), params={"tenant": second})
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_required"
    assert len(engine.asked) == num_asked
    assert (await keyed.request(method, path, headers=key("root"), params={"tenant": second})).status_code == 200
    assert engine.asked[-1][1]["tenant"] == second


async def test_who_flushes_what(keyed: httpx.AsyncClient, engine: NotingEngine) -> None:
    async def flush(name: str, **body: Any) -> Any:
        response = await keyed.post("/v1/cache/flush", headers=key(name), json=body)
        assert response.json() == {"flushed_pages": 3, "flushed_tokens": 48, "flushed_tier_pages": 2}
        return engine.asked[-1][1]

    own = await flush("a")
    assert own["salt"] is None
    assert len(own["tenant"]) == 32
    assert await flush("a", cache_salt="s") == {"tenant": own["tenant"], "salt": "s"}
    assert await flush("a", cache_salt="") == {"tenant": own["tenant"], "salt": ""}
    assert await flush("root") == {"tenant": None, "salt": None}
    assert await flush("root", tenant=own["tenant"]) == own
    refused = await keyed.post("/v1/cache/flush", headers=key("b"), json={"tenant": own["tenant"]})
    assert refused.status_code == 403
    assert (await keyed.delete("/v1/cache", headers=key("a"))).status_code == 200
    assert engine.asked[-1][1] == own
    assert (await keyed.delete("/v1/cache", headers=key("root"))).status_code == 200
    assert engine.asked[-1][1]["tenant"] not in (None, own["tenant"]), "its own, not everybody's"


async def test_flush_needs_no_body_but_reads_it(http: httpx.AsyncClient, engine: NotingEngine) -> None:
    assert (await http.post("/v1/cache/flush")).status_code == 200
    for body, param in (({"cache_slat": "s"}, "cache_slat"), ({"tenant": 1}, "tenant")):
        response = await http.post("/v1/cache/flush", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    assert len(engine.asked) == 1, "a misspelt field flushes nothing"


@pytest.mark.parametrize(
    ("method", "address", "allowed"),
    [
        ("POST", "/v1/cache/flush?cache_salt=s", "only tenant may"),
        ("DELETE", "/v1/cache?tenant=5f2c41d0", "none may"),
    ],
)
async def test_a_flush_hears_all_that_stands_in_its_address(
    http: httpx.AsyncClient, engine: NotingEngine, method: str, address: str, allowed: str
) -> None:
    response = await http.request(method, address)
    assert response.status_code == 400 and allowed in response.json()["error"]["message"]
    assert not engine.asked


async def test_pins_of_others_cannot_be_deleted(keyed: httpx.AsyncClient, engine: NotingEngine) -> None:
    assert (await keyed.delete("/v1/cache/pins/7", headers=key("a"))).json() == {"id": 7, "deleted": True}
    method, args = engine.asked[-1]
    assert (method, args["pin_id"], len(args["tenant"])) == ("unpin", 7, 32)
    await keyed.delete("/v1/cache/pins/7", headers=key("root"))
    assert engine.asked[-1][1] == {"tenant": None, "pin_id": 7}
    engine.replies["unpin"] = False
    response = await keyed.delete("/v1/cache/pins/7", headers=key("a"))
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "There is no pin '7'. GET /v1/cache/pins lists those there are."


@pytest.mark.parametrize("pin_id", ["x", "-1", "1.5", "9" * 30, "٣"])
async def test_pins_have_numbers(http: httpx.AsyncClient, engine: NotingEngine, pin_id: str) -> None:
    assert (await http.delete(f"/v1/cache/pins/{pin_id}")).status_code == 404
    assert not engine.asked


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("depth", "0", "an integer from 1 to 64"),
        ("depth", "65", "an integer from 1 to 64"),
        ("limit", "-1", "an integer from 1 to 1000"),
        ("limit", "9" * 5000, "an integer from 1 to 1000"),
        ("top", "many", "an integer from 0 to 100"),
        ("top", "", "an integer from 0 to 100"),
    ],
)
async def test_bounds_of_the_tree(
    http: httpx.AsyncClient, engine: NotingEngine, name: str, given: str, allowed: str
) -> None:
    response = await http.get("/v1/cache/tree", params={name: given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert response.json()["error"]["message"].endswith(f"allowed is {allowed}.")
    assert len(response.text) < 400
    assert not engine.asked


async def test_tree_is_asked_for_what_was_said(http: httpx.AsyncClient, engine: NotingEngine) -> None:
    await http.get("/v1/cache/tree", params={"depth": "64", "limit": "1000", "top": "0"})
    await http.get("/v1/cache/tree")
    assert [args for _, args in engine.asked] == [
        {"tenant": None, "depth": 64, "limit": 1000, "top": 0},
        {"tenant": None, "depth": 8, "limit": 100, "top": 10},
    ]


async def test_explain_asks_about_the_prompt_that_would_be_sent(
    keyed: httpx.AsyncClient, engine: NotingEngine, tokenizer: Tokenizer
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "cache_salt": "s"}
    assert (await keyed.post("/v1/cache/explain", headers=key("a"), json=chat)).status_code == 200
    assert (await keyed.post("/v1/cache/explain", headers=key("b"), json={"prompt": [1, 2]})).status_code == 200
    (_, first), (_, second) = engine.asked
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert memoryview(first["prompt"]).cast("i").tolist() == tokenizer.encode(text)
    assert (first["salt"], second["salt"]) == ("s", "")
    assert memoryview(second["prompt"]).cast("i").tolist() == [1, 2]
    assert first["tenant"] != second["tenant"]


@pytest.mark.parametrize("path", ["/v1/cache/explain", "/v1/cache/plan", "/v1/cache/warm"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "cache_control": 1}, "cache_control"),
        ({"prompt": "x", "top_p": 7}, "top_p"),
    ],
)
async def test_bad_bodies(http: httpx.AsyncClient, engine: NotingEngine, path: str, body: Any, param: str) -> None:
    if param == "top_p" and "warm" in path:
        return  # nothing is sampled there
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(response.text) < 600
    assert not engine.asked


@pytest.mark.parametrize("path", ["/v1/cache/explain", "/v1/cache/plan", "/v1/cache/warm"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'messages' and 'prompt' are both missing; one of them is required."),
        ({**PROMPT, "messages": []}, "'messages' and 'prompt' are both given; send one of them."),
    ],
)
async def test_a_chat_or_a_completion(http: httpx.AsyncClient, path: str, body: Any, message: str) -> None:
    response = await http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


async def test_unknown_tenant_is_404_for_an_admin(keyed: httpx.AsyncClient, engine: NotingEngine) -> None:
    for name, status in (("root", 404), ("a", 403)):
        for response in (
            await keyed.get("/v1/cache/tree", headers=key(name), params={"tenant": "acme"}),
            await keyed.post("/v1/cache/flush", headers=key(name), json={"tenant": "acme"}),
        ):
            assert response.status_code == status
    assert not engine.asked


async def test_tenants(keyed: httpx.AsyncClient, engine: NotingEngine) -> None:
    async def listed(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await keyed.get("/v1/tenants", headers=key(name))).json()["data"]
        return found

    (own,) = await listed("b")
    assert (own["keys"], own["is_own"], own["cached_tokens"]) == (["--api-key 2"], True, 0)
    engine.replies["tenants"] = {own["tenant"]: {"cached_tokens": 32, "requests": 1}}
    first, second, admin = await listed("root")
    assert second == {**own, "is_own": False, "cached_tokens": 32, "requests": 1}
    assert [first["keys"], admin["keys"], admin["is_own"]] == [["--api-key 1"], ["--admin-api-key"], True]
    await keyed.get("/v1/cache/tree", headers=key("root"), params={"tenant": own["tenant"][:8]})
    assert engine.asked[-1][1]["tenant"] == own["tenant"], "as the log names it"


async def test_pins_say_what_is_pinned(
    http: httpx.AsyncClient, engine: NotingEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(text: str) -> bytes:
        return array("i", tokenizer.encode(text)).tobytes()

    monkeypatch.setattr(time, "time", lambda: 1777896000.0)
    pin = {"id": 1, "tenant": "", "salt": "s", "num_tokens": 6, "expires_in_seconds": 1 / 3}
    engine.replies["pins"] = [
        {**pin, "tokens": tokens("abcdef"), "ends_with": tokens("abcdef")},
        {**pin, "num_tokens": 99, "tokens": tokens("You are"), "ends_with": tokens("kind.")},
    ]
    whole, cut = (await http.get("/v1/cache/pins")).json()["data"]
    assert whole == {
        "id": 1,
        "tenant": "",
        "cache_salt": "s",
        "text": "abcdef",
        "ends_with": "abcdef",
        "pinned_tokens": 6,
        "expires_in_seconds": 0.333333,
        "expires_at": 1777896000.333333,
    }
    assert (cut["text"], cut["ends_with"]) == ("You are…", "…kind.")


def test_floats_are_rounded() -> None:
    assert rounded({"a": [0.12345678, 2, None, "x"], "b": b"1"}) == {"a": [0.123457, 2, None, "x"], "b": b"1"}


async def test_unknown_model_is_404(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/cache/plan", json={**PROMPT, "model": "other"})).status_code == 404


@pytest.mark.parametrize("ttl", [0, 86_401, "2d", 1.5, None])
async def test_ttl_of_warm(http: httpx.AsyncClient, ttl: Any) -> None:
    response = await http.post("/v1/cache/warm", json={**PROMPT, "ttl": ttl})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        f"'ttl' is {shown(ttl)}; allowed is '5m', '1h' or seconds from 1 to 86400."
    )


async def test_explanation_of_prompt_logprobs_asks_nobody(http: httpx.AsyncClient, engine: NotingEngine) -> None:
    body = {**PROMPT, "echo": True, "logprobs": 1}
    explained = (await http.post("/v1/cache/explain", json=body)).json()
    assert explained["reason"] == "prompt_logprobs"
    assert explained["sentence"] == (
        "The log-probabilities of the prompt are wanted, and the cache holds none: all 12 prompt tokens are computed."
    )
    assert not engine.asked


async def test_openapi_describes_every_route(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for route in ROUTES:
        described = document["paths"][route.path][route.method.lower()]
        answer = described["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer == {"$ref": f"#/components/schemas/{route.answer.__name__}"}
        assert schemas[route.answer.__name__]["properties"].keys() == set(route.answer.__struct_fields__)
        assert ("requestBody" in described) == bool(route.bodies)
        assert {name for name, _ in route.query} <= {parameter["name"] for parameter in described.get("parameters", ())}
        assert described["description"]
    assert "ttl" in schemas["WarmChatRequest"]["properties"]
    assert document["paths"]["/v1/cache/flush"]["post"]["requestBody"]["required"] is False
    assert document["paths"]["/v1/cache/warm"]["post"]["requestBody"]["required"] is True


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for child in value.values():
            yield from refs(child)
    elif isinstance(value, list):
        for child in value:
            yield from refs(child)


async def test_openapi_refers_to_nothing_that_is_not_there(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    names = {ref.removeprefix("#/components/schemas/") for ref in refs(document)}
    assert names - document["components"]["schemas"].keys() == set()

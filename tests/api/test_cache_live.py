"""What is cached and what waits, asked of a real server with two keys and an admin: every answer over a socket.

The server's cache is small. Each test starts with it empty, and has words of its own: what was flushed is remembered.
"""

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest

from tests.api.serving import MODEL, Server, metrics, sse_events, wait_idle

pytestmark = pytest.mark.slow  # together more than a second or two

SECRET = "xyzzy plugh frotz"
WAIT_FOR = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
PAGE = 16
numbers = itertools.count(100)


class Words:
    """Of one test: all its prompts begin with a number of its own."""

    number = 0


def text(words: str) -> str:
    return f"{Words.number} {words}"


def chat(system: str = "Be short. Today is the 3rd of May.", user: str = "When do you open?") -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": text(system)}, {"role": "user", "content": user}]}


class Client:
    """Sends JSON with one key."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._read(self.http.post("/v1" + path, json=body))

    def get(self, path: str, **query: Any) -> Any:
        return self._read(self.http.get("/v1" + path, params=query))

    def delete(self, path: str) -> Any:
        return self._read(self.http.delete("/v1" + path))

    def chat(self, body: dict[str, Any] | None = None, **fields: Any) -> Any:
        return self.post("/chat/completions", {**WAIT_FOR, **(body or chat()), **fields})

    def complete(self, prompt: str | list[str], **fields: Any) -> Any:
        return self.post("/completions", {**WAIT_FOR, "prompt": prompt, **fields})

    def explain(self, body: dict[str, Any] | None = None, **fields: Any) -> Any:
        return self.post("/cache/explain", {**(body or chat()), **fields})

    @staticmethod
    def _read(response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        return response.json()


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def shop(tiny: Path) -> Iterator[Server]:
    flags = [
        "--api-key",
        "key-a",
        "key-b",
        "--admin-api-key",
        "root",
        "--kv-cache-memory",
        "1MiB",
        "--max-model-len",
        "2048",
    ]
    with Server(tiny, "--served-model-name", MODEL, *flags, "--generation-config", "vllm") as server:
        yield server.wait_ready()


@pytest.fixture
def root(shop: Server) -> Iterator[Client]:
    Words.number = next(numbers)
    with Client(shop.url, "root") as client:
        for pin in client.get("/cache/pins")["data"]:
            client.delete(f"/cache/pins/{pin['id']}")
        client.post("/cache/flush", {})
        yield client


@pytest.fixture
def a(shop: Server, root: Client) -> Iterator[Client]:
    with Client(shop.url, "key-a") as client:
        yield client


@pytest.fixture
def b(shop: Server, root: Client) -> Iterator[Client]:
    with Client(shop.url, "key-b") as client:
        yield client


# ---------------------------------------------------------------- tenants


def test_timing_channel_is_closed(a: Client, b: Client) -> None:
    """CVE-2025-46570: what one tenant has sent makes nothing faster for another."""
    assert cached(a.chat()) == 0
    assert cached(b.chat()) == 0
    assert cached(a.chat()) == cached(b.chat()) > 0


def test_salt_narrows_and_never_widens(a: Client, b: Client) -> None:
    a.chat(cache_salt="s")
    assert cached(a.chat()) == 0
    assert cached(b.chat(cache_salt="s")) == 0
    assert cached(a.chat(cache_salt="s")) > 0


@pytest.mark.slow
def test_shared_on_purpose(tiny: Path) -> None:
    flags = ["--api-key", "key-a", "key-b", "--cache-sharing", "all", "--kv-cache-memory", "16MiB"]
    with Server(tiny, *flags) as server, Client(server.url, "key-a") as first, Client(server.url, "key-b") as second:
        server.wait_ready()
        assert cached(first.chat()) == 0
        assert cached(second.chat()) > 0
        assert second.explain()["reason"] == "complete"


def test_no_foreign_text_appears(a: Client, b: Client, root: Client) -> None:
    """Whatever a tenant asks, nothing of another's prompts, ids, salts or names is in the answer."""
    theirs = chat(user=SECRET)
    answer = a.chat(theirs, cache_salt="salt-of-a", cache_control={"type": "ephemeral"})
    (tenant,) = {found["tenant"] for found in root.get("/cache/tree")["namespaces"]}
    told = [
        b.chat(theirs, cache_report=True)["cache_report"],
        b.explain(),
        b.explain(cache_salt="salt-of-a"),
        b.post("/cache/plan", theirs),
        b.get("/cache/tree"),
        b.get("/cache/pins"),
        b.get("/queue"),
        b.delete("/cache"),
    ]
    for foreign in (answer["id"], "salt-of-a", tenant):
        assert foreign not in json.dumps(told)
    for foreign in (SECRET, answer["id"], "salt-of-a", tenant):
        assert foreign not in json.dumps(told[1:4])
    assert told[0]["reason"] == "unseen"
    assert told[1]["reason"] == "differs", "of its own"
    pinned = root.get("/cache/pins")["data"]
    assert [pin["tenant"] for pin in pinned] == [tenant], "flushing one's own leaves the other's"
    assert SECRET in json.dumps(root.get("/cache/tree", tenant=tenant))


# ---------------------------------------------------------------- explanations


def test_difference_in_a_system_prompt(a: Client) -> None:
    a.chat()
    explained = a.explain(chat("Be short. Today is the 4th of May."))
    num = explained["prompt_tokens"]
    assert explained["sentence"] == (
        f"16 of the {num} prompt tokens are cached. The nearest cached prompt is the same for 30 tokens; then, at character 27 of"
        " messages[0] (system), it has '3rd of May' where this one has '4th of May'."
    )
    assert explained["difference"] == {
        "token": 30,
        "cached": "3rd of May",
        "sent": "4th of May",
        "place": "character 27 of messages[0] (system)",
        "message": 0,
        "document": None,
        "role": "system",
        "character": 27,
    }


def test_difference_in_a_later_message_and_in_the_template(a: Client) -> None:
    a.chat(chat(user="When do you open tomorrow?"))
    later = a.explain(chat(user="When do you open today?"))["sentence"]
    assert later.endswith(
        "at character 19 of messages[1] (user), it has 'morrow?<|im_end|>' where this one has 'day?<|im_end|>\\n<|im_start|>a'."
    ), later
    template = a.explain({"messages": [chat()["messages"][0], {"role": "assistant", "content": "open"}]})
    assert template["difference"]["message"] is None
    assert (
        "then, in the template's own text between messages[0] and messages[1], it has 'user\\nWhen '"
        in template["sentence"]
    )


def test_difference_in_a_completion_has_no_place(a: Client) -> None:
    a.complete(text("one " * 12))
    assert a.explain({"prompt": text("one " * 9 + "two")})["difference"]["place"] is None


def test_answer_carries_its_report(a: Client) -> None:
    assert "cache_report" not in a.chat()
    expected = a.explain()
    assert a.chat(cache_report=True)["cache_report"] == expected
    assert expected["reason"] == "complete"
    report = a.complete(text("one " * 12), cache_report=True)["cache_report"]
    assert report["sentence"].startswith("None of the 40 prompt tokens is cached. Nothing that begins like this")
    many = a.complete([text("one " * 12), text("two " * 12)], n=2, cache_report=True)["cache_report"]
    assert [one["reason"] for one in many] == ["complete", "differs"]
    logprobs = a.complete(text("one " * 12), echo=True, logprobs=0, cache_report=True)["cache_report"]
    assert logprobs["reason"] == "prompt_logprobs"
    assert logprobs["sentence"] == a.explain({"prompt": text("one " * 12), "echo": True, "logprobs": 0})["sentence"]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_last_chunk_of_a_stream_carries_the_report(a: Client, path: str, usage: bool) -> None:
    body = {**WAIT_FOR, "stream": True, "cache_report": True, "n": 2, "stream_options": {"include_usage": usage}}
    body |= {"prompt": text("one " * 12)} if "chat" not in path else chat()
    *chunks, last, done = sse_events(a.http.post(path, json=body).text)
    assert done == "[DONE]"
    assert not any("cache_report" in json.loads(chunk) for chunk in chunks)
    end = json.loads(last)
    assert end["choices"] == []
    assert end["cache_report"]["reason"] == "unseen"
    assert ("usage" in end) == usage


def test_openai_client_reads_a_stream_with_a_report(shop: Server, root: Client) -> None:
    with openai.OpenAI(base_url=shop.url + "/v1", api_key="key-a", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=MODEL, stream=True, max_tokens=2, extra_body={"cache_report": True}, **chat()
        )
        *_, last = stream
    assert last.cache_report["reason"] == "unseen"


def test_the_log_has_the_reason_and_no_text(shop: Server, a: Client) -> None:
    answer = a.chat(chat(user=SECRET))
    line = shop.wait_for(rf"INFO \S+ \[api\] request (id={answer['id']} .*)\n").group(1)
    logged = dict(pair.split("=") for pair in line.split())
    assert int(logged["prompt"]) == answer["usage"]["prompt_tokens"]
    assert (logged["cached"], logged["completion"], logged["reason"], logged["finish"]) == (
        *("0", "2", "unseen", "length"),
    )
    assert 0 < float(logged["ttft"]) <= float(logged["seconds"])
    (own,) = a.get("/tenants")["data"]
    assert logged["tenant"] == own["tenant"][:8]
    for words in (SECRET, "short", "key-a", "key-b", "root"):
        assert words not in shop.output.split("Ready: ")[1]


def test_prompt_shared_by_choices_is_counted_once(shop: Server, a: Client) -> None:
    name = 'trunkline:prompt_tokens_total{model_name="tiny"}'
    before = metrics(shop.url)[name]
    answer = a.chat(n=4)
    assert metrics(shop.url)[name] - before == answer["usage"]["prompt_tokens"]


def test_difference_in_a_document(a: Client) -> None:
    documents = [text("We are closed on Sundays."), {"title": "Hours", "text": "Open from 9 to 5."}]
    a.chat(documents=documents)
    documents[1] = {"title": "Hours", "text": "Open from 8 to 5."}
    explained = a.explain(documents=documents)
    num, token = explained["prompt_tokens"], explained["difference"]["token"]
    assert explained["difference"] == {
        "token": token,
        "cached": "9 to 5.\n<",
        "sent": "8 to 5.\n<",
        "place": "character 10 of documents[1]",
        "message": None,
        "document": 1,
        "role": None,
        "character": 10,
    }
    assert explained["sentence"] == (
        f"{token // PAGE * PAGE} of the {num} prompt tokens are cached. The nearest cached prompt is the same for {token} tokens;"
        " then, at character 10 of documents[1], it has '9 to 5.\\n<' where this one has '8 to 5.\\n<'."
    )
    documents[1] = {"title": "House", "text": "Open from 8 to 5."}
    assert "at character 3 of the title of documents[1], it has 'rs" in a.explain(documents=documents)["sentence"]
    assert "at character 0 of documents[0], it has" in a.explain(documents=["Other", *documents[1:]])["sentence"]


def test_misses_are_counted_by_reason(shop: Server, a: Client) -> None:
    def count(reason: str) -> float:
        return metrics(shop.url).get(f'trunkline:prefix_cache_misses_total{{reason="{reason}"}}', 0)

    before = count("unseen"), count("differs")
    a.chat()
    a.chat()
    a.chat(chat("Be short. Today is the 4th of May."))
    assert (count("unseen"), count("differs")) == (before[0] + 1, before[1] + 1)


# ---------------------------------------------------------------- plan, tree, queue


def test_plan_says_what_would_be_computed(a: Client) -> None:
    cold = a.post("/cache/plan", chat())
    assert cold["tokens_to_compute"] == cold["prompt_tokens"]
    answer = a.chat()
    warm = a.post("/cache/plan", chat())
    assert warm["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert warm["cached_tokens"] == warm["cached_by_tier"]["device"] == (warm["prompt_tokens"] - 1) // PAGE * PAGE
    assert warm["tokens_to_compute"] == warm["prompt_tokens"] - warm["cached_tokens"]
    assert warm["expected_ttft_seconds"] == pytest.approx(warm["queue_seconds"] + warm["prefill_seconds"])
    assert cached(a.chat()) == warm["cached_tokens"]


def test_tree(a: Client, root: Client) -> None:
    for _ in range(3):
        a.chat()
    a.chat(chat(user="Where is your shop? ☃"))
    a.chat(cache_salt="s")
    tree = a.get("/cache/tree")
    assert [found["cache_salt"] for found in tree["namespaces"]] == ["", "s"]
    (top,) = tree["namespaces"][0]["children"]
    assert top["text"].startswith(f"<|im_start|>system\n{Words.number} Be short. Today is the 3rd")
    assert (top["references"], top["pinned"], top["tier"]) == (0, False, "device")
    assert top["hits"] == 3
    assert top["tokens_saved"] == 3 * top["num_tokens"]
    assert len(top["children"]) == 2
    best = tree["top"][0]
    assert best["hits"] * best["num_tokens"] == best["tokens_saved"]
    assert best["text"].startswith(top["text"])
    assert tree["reuse_curve"] == []
    curve = root.get("/cache/tree", top=0)["reuse_curve"]
    assert [point["times"] for point in curve] == sorted(point["times"] for point in curve)
    assert 0 < curve[-1]["hit_rate"] <= 1
    small = a.get("/cache/tree", depth=1, limit=1, top=0)
    (shown,) = [child for found in small["namespaces"] for child in found["children"]]
    assert (shown["children"], shown["left_out"], small["top"]) == ([], 2, [])


def test_tree_of_characters_cut_in_two(a: Client) -> None:
    a.complete("☃" * 16)
    (root,) = a.get("/cache/tree")["namespaces"]
    assert root["children"][0]["text"].startswith("☃" * 5)
    assert a.explain({"prompt": "☃" * 5 + "☄" * 9})["difference"]["sent"].startswith("\\x84☄")


@pytest.mark.slow
def test_queue_says_who_waits_and_why(tiny: Path) -> None:
    flags = [
        "--api-key",
        "key-a",
        "key-b",
        "--kv-cache-memory",
        "16MiB",
        "--max-num-seqs",
        "1",
        "--max-waiting-requests",
        "1",
    ]
    with Server(tiny, *flags) as server, Client(server.url, "key-a") as first, Client(server.url, "key-b") as second:
        server.wait_ready()
        assert first.get("/queue") == {"waiting": [], "running": []}
        stop = threading.Event()

        def stream(client: Client) -> None:
            body = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
            with client.http.stream("POST", "/v1/completions", json=body) as response:
                for _ in response.iter_raw():
                    if stop.is_set():
                        return

        threads = [threading.Thread(target=stream, args=(client,)) for client in (first, second)]
        threads[0].start()
        while not (running := first.get("/queue")["running"]):
            pass
        threads[1].start()
        while not (waiting := second.get("/queue")["waiting"]):
            pass
        try:
            assert running[0]["prompt_tokens"] == 1
            assert "taken" in waiting[0]["why"], waiting
            assert second.get("/queue")["running"] == []
            assert first.get("/queue")["waiting"] == []
            assert first.explain({"prompt": "hello"})["reason"] == "short", "asked while the engine is busy"
            refused = first.http.post("/v1/completions", json={"prompt": "hello", "stream": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        finally:
            stop.set()
            for thread in threads:
                thread.join()


# ---------------------------------------------------------------- keeping


def test_warm_then_hit_then_unpin(a: Client, b: Client) -> None:
    system = {"messages": chat()["messages"][:1]}
    warmed = a.post("/cache/warm", {**system, "ttl": 60})
    assert warmed["expires_in_seconds"] == 60
    assert warmed["pinned_tokens"] == warmed["prompt_tokens"] // PAGE * PAGE > 0
    assert cached(a.chat()) == warmed["pinned_tokens"]
    (pin,) = a.get("/cache/pins")["data"]
    assert (pin["id"], pin["pinned_tokens"]) == (warmed["id"], warmed["pinned_tokens"])
    assert 0 < pin["expires_in_seconds"] <= 60
    assert pin["expires_at"] == pytest.approx(warmed["expires_at"], abs=5)
    assert pin["text"].startswith(f"<|im_start|>system\n{Words.number} Be short.")
    assert pin["text"].endswith(pin["ends_with"])
    assert b.get("/cache/pins")["data"] == []
    assert b.http.delete(f"/v1/cache/pins/{pin['id']}").status_code == 404
    a.delete("/cache")
    assert a.explain()["cached_tokens"] == warmed["pinned_tokens"], "a pin outlives a flush"
    assert a.delete(f"/cache/pins/{pin['id']}") == {"id": pin["id"], "deleted": True}
    assert a.http.delete(f"/v1/cache/pins/{pin['id']}").status_code == 404
    assert a.delete("/cache")["flushed_tokens"] == warmed["pinned_tokens"]


def test_warm_of_a_completion_by_name(a: Client) -> None:
    warmed = a.post("/cache/warm", {"prompt": text("one " * 12), "ttl": "1h"})
    assert (warmed["prompt_tokens"], warmed["pinned_tokens"], warmed["expires_in_seconds"]) == (40, 32, 3600)


def test_warm_refuses_what_cannot_be_kept(a: Client) -> None:
    for prompt, words in (("short", "shorter than a page"), ("long " * 300, "pages of 16 tokens would be pinned")):
        response = a.http.post("/v1/cache/warm", json={"prompt": prompt})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "pin_refused")
        assert words in response.json()["error"]["message"]


def test_pinned_prefix_survives_pressure(a: Client, b: Client) -> None:
    pinned = a.post("/cache/warm", {"prompt": "keep " * 20})["pinned_tokens"]
    a.complete("drop " * 20)
    for number in range(8):
        b.complete(f"{number} pressure " * 100)
    assert a.explain({"prompt": "keep " * 20 + "!"})["cached_tokens"] == pinned
    assert a.explain({"prompt": "drop " * 20})["reason"] == "evicted"


def test_cache_control_on_a_message(a: Client) -> None:
    marked = {**chat()["messages"][0], "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    answer = a.chat({"messages": [marked, chat()["messages"][1]]})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "pinned_tokens": 32}
    (pin,) = a.get("/cache/pins")["data"]
    assert pin["pinned_tokens"] == 32, "the system message, not the question"
    assert 3500 < pin["expires_in_seconds"] <= 3600
    assert "pinned_tokens" not in a.chat()["usage"]["prompt_tokens_details"]


def test_cache_control_of_a_request(a: Client) -> None:
    answer = a.chat(cache_control={"type": "ephemeral"}, n=2)
    assert answer["usage"]["prompt_tokens_details"]["pinned_tokens"] == answer["usage"]["prompt_tokens"] // PAGE * PAGE
    a.complete(text("one " * 12), cache_control={"type": "ephemeral", "ttl": 7})
    first, second = a.get("/cache/pins")["data"]
    assert first["expires_in_seconds"] <= 300
    assert second["expires_in_seconds"] <= 7


def test_more_than_may_be_pinned_is_served_all_the_same(a: Client) -> None:
    answer = a.complete("long " * 300, cache_control={"type": "ephemeral"})
    assert answer["usage"]["prompt_tokens_details"]["pinned_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"
    assert a.get("/cache/pins")["data"] == []


def test_flush_of_one_salt(a: Client) -> None:
    a.chat()
    a.chat(cache_salt="s")
    assert a.post("/cache/flush", {"cache_salt": "s"})["flushed_pages"] > 0
    assert a.explain(cache_salt="s")["reason"] == "evicted"
    assert a.explain()["reason"] == "complete"
    assert a.post("/cache/flush", {"cache_salt": ""})["flushed_pages"] > 0
    assert a.explain()["sentence"].endswith("The beginning was flushed less than a second ago.")


def test_client_that_leaves_while_it_warms(shop: Server, a: Client) -> None:
    request = a.http.build_request("POST", "/v1/cache/warm", json={"prompt": "left " * 150})
    lines = [b"POST /v1/cache/warm HTTP/1.1", *(name + b": " + value for name, value in request.headers.raw)]
    with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
        connection.sendall(b"\r\n".join([*lines, b"", b""]) + request.content)
    wait_idle(shop.url)
    assert a.get("/queue")["running"] == []


def test_ten_thousand_messages_are_explained(a: Client) -> None:
    body = {"messages": [{"role": "user", "content": ""}] * 10_000}
    response = a.http.post("/v1/cache/explain", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"

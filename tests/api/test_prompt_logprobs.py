"""prompt_logprobs: the prompt's own tokens scored, in vLLM's shape, whatever is cached."""

from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL
from trunkline.models.tokenizer import Tokenizer

TEXT = "hello world and the rest of a prompt that is longer than a page of the cache"
CHAT = {"messages": [{"role": "user", "content": TEXT}]}


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"model": MODEL, "temperature": 0, "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    return post(http, "/v1/completions", **{"prompt": TEXT, **body})


def check_entries(entries: list[Any], token_ids: list[int], tokenizer: Tokenizer, num: int) -> None:
    """As vLLM's: null, then for each token itself and the `num` likeliest, by id."""
    assert len(entries) == len(token_ids)
    assert entries[0] is None
    for token_id, entry in zip(token_ids[1:], entries[1:], strict=True):
        own, *_ = entry
        assert own == str(token_id), "the token itself comes first"
        assert {scored["rank"] for scored in entry.values()} >= set(range(1, num + 1))
        assert num <= len(entry) <= num + 1
        for key, scored in entry.items():
            assert scored.keys() == {"logprob", "rank", "decoded_token"}
            assert scored["decoded_token"] == tokenizer.token_text(int(key))
        ranked = sorted(entry.values(), key=lambda scored: scored["rank"])
        assert [scored["logprob"] for scored in ranked] == sorted((s["logprob"] for s in ranked), reverse=True)


@pytest.mark.parametrize("num", [0, 1, 3])
def test_completions(http: httpx.Client, tokenizer: Tokenizer, num: int) -> None:
    choice = complete(http, prompt_logprobs=num)["choices"][0]
    check_entries(choice["prompt_logprobs"], tokenizer.encode(TEXT), tokenizer, num)
    assert choice["logprobs"] is None


@pytest.mark.parametrize("num", [0, 2])
def test_chat(http: httpx.Client, tokenizer: Tokenizer, num: int) -> None:
    answer = post(http, "/v1/chat/completions", **CHAT, prompt_logprobs=num, return_token_ids=True)
    check_entries(answer["prompt_logprobs"], answer["prompt_token_ids"], tokenizer, num)
    assert answer["choices"][0]["logprobs"] is None


def test_nobody_asked(http: httpx.Client) -> None:
    assert "prompt_logprobs" not in post(http, "/v1/chat/completions", **CHAT)
    assert "prompt_logprobs" not in complete(http, prompt_logprobs=None)["choices"][0]


def test_they_are_those_of_an_echo(http: httpx.Client) -> None:
    (choice,) = complete(http, prompt_logprobs=3, echo=True, logprobs=1)["choices"]
    (alone,) = complete(http, echo=True, logprobs=1)["choices"]
    assert choice["logprobs"] == alone["logprobs"], "no more alternatives than were asked for here"
    num = len(choice["prompt_logprobs"])
    own = [None if entry is None else next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"]]
    assert choice["logprobs"]["token_logprobs"][:num] == own
    (fewer,) = complete(http, prompt_logprobs=0, echo=True, logprobs=3)["choices"]
    assert all(len(entry) == 1 for entry in fewer["prompt_logprobs"][1:])


def test_each_prompt_and_each_choice(http: httpx.Client, tokenizer: Tokenizer) -> None:
    choices = complete(http, prompt=[TEXT, "hello the"], n=2, temperature=1, seed=1, prompt_logprobs=1)["choices"]
    for choice, text in zip(choices, [TEXT, TEXT, "hello the", "hello the"], strict=True):
        check_entries(choice["prompt_logprobs"], tokenizer.encode(text), tokenizer, 1)
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]


def test_a_prompt_of_one_token(http: httpx.Client) -> None:
    assert complete(http, prompt="?", prompt_logprobs=1)["choices"][0]["prompt_logprobs"] == [None]


def test_a_cut_prompt(http: httpx.Client, tokenizer: Tokenizer) -> None:
    choice = complete(http, prompt_logprobs=1, truncate_prompt_tokens=4)["choices"][0]
    check_entries(choice["prompt_logprobs"], tokenizer.encode(TEXT)[-4:], tokenizer, 1)


def test_what_is_cached_is_read_anew(http: httpx.Client) -> None:
    """The answer says so, as do the routes that are asked before."""
    first = complete(http, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert complete(http)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16, "it is cached for others"
    again = complete(http, prompt_logprobs=1, cache_report=True)
    assert again["choices"][0]["prompt_logprobs"] == first
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["cache_report"]["reason"] == "prompt_logprobs"
    asked = {"prompt": TEXT, "prompt_logprobs": 1}
    assert post(http, "/v1/cache/explain", **asked) == again["cache_report"]
    planned = post(http, "/v1/cache/plan", **asked)
    assert (planned["cached_tokens"], planned["tokens_to_compute"]) == (0, planned["prompt_tokens"])
    assert post(http, "/v1/cache/plan", prompt=TEXT)["cached_tokens"] >= 16


@pytest.mark.parametrize("wrong", [-1, 21, "5", True, 1.0])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_numbers(http: httpx.Client, path: str, wrong: Any) -> None:
    body = CHAT if "chat" in path else {"prompt": TEXT, "echo": True, "logprobs": 1}
    response = http.post(path, json={**body, "prompt_logprobs": wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("body", [CHAT, {"prompt": TEXT}])
def test_not_in_a_stream(http: httpx.Client, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = http.post(path, json={**body, "prompt_logprobs": 0, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert http.post(path, json={**body, "prompt_logprobs": None, "stream": True}).status_code == 200

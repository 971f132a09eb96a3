"""truncate_prompt_tokens: of a prompt only the last tokens are read, and what is said of it is said of those."""

from typing import Any

import httpx
import pytest

from tests.api.serving import CONTEXT, MODEL
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.errors import InvalidParameter
from trunkline.models.tokenizer import Tokenizer

TEXT = "hello world and the"
LONG = [{"role": "user", "content": "?" * (2 * CONTEXT)}]


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    settings = {"model": MODEL, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    response = http.post(path, json={**settings, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    return post(http, "/v1/completions", **body)


def test_the_last_tokens_are_read(http: httpx.Client, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    for prompt in (TEXT, tokens):
        answer = complete(http, prompt=prompt, truncate_prompt_tokens=2)
        assert answer["choices"][0]["prompt_token_ids"] == tokens[-2:]
        assert answer["usage"]["prompt_tokens"] == 2
        assert answer["choices"][0]["text"] == complete(http, prompt=tokens[-2:])["choices"][0]["text"]


@pytest.mark.parametrize("most", [None, 4, 5, CONTEXT + 1])
def test_a_prompt_that_is_short_enough_stays(http: httpx.Client, tokenizer: Tokenizer, most: int | None) -> None:
    answer = complete(http, prompt=TEXT, truncate_prompt_tokens=most)
    assert answer["choices"][0]["prompt_token_ids"] == tokenizer.encode(TEXT)


def test_each_prompt_by_itself(http: httpx.Client, tokenizer: Tokenizer) -> None:
    choices = complete(http, prompt=[TEXT, "?", "!?!?"], truncate_prompt_tokens=3)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        tokenizer.encode(text) for text in (" world and the", "?", "?!?")
    ]


def test_echo_is_what_was_read(http: httpx.Client) -> None:
    plain = complete(http, prompt=" and the", echo=True, logprobs=1)["choices"][0]
    cut = complete(http, prompt=TEXT, truncate_prompt_tokens=2, echo=True, logprobs=1)["choices"][0]
    assert cut["text"].startswith(" and the")
    assert (cut["text"], cut["logprobs"]) == (plain["text"], plain["logprobs"])
    assert complete(http, prompt=TEXT, truncate_prompt_tokens=9, echo=True)["choices"][0]["text"].startswith(TEXT)


def test_a_chat(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}]}
    whole = post(http, "/v1/chat/completions", **body)["prompt_token_ids"]
    cut = post(http, "/v1/chat/completions", **body, truncate_prompt_tokens=5)
    assert cut["prompt_token_ids"] == whole[-5:]
    documents = {**body, "documents": ["One.", "Two."]}
    whole = post(http, "/v1/chat/completions", **documents)["prompt_token_ids"]
    cut = post(http, "/v1/chat/completions", **documents, truncate_prompt_tokens=40)
    assert len(whole) > 40
    assert cut["prompt_token_ids"] == whole[-40:]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None, "max_completion_tokens": 7}])
def test_what_fits_beside_the_answer(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = post(http, "/v1/chat/completions", messages=LONG, truncate_prompt_tokens=-1, **fields)
    generated = fields.get("max_completion_tokens", 4)
    assert answer["usage"]["completion_tokens"] == generated
    assert answer["usage"]["prompt_tokens"] == CONTEXT - generated


def test_too_long_a_text_is_cut_not_refused(http: httpx.Client) -> None:
    """Far longer than any text that could fit: without the field it is not even tokenized."""
    text = "?" * (100 * CONTEXT) + TEXT
    assert http.post("/v1/completions", json={"prompt": text}).status_code == 400
    answer = complete(http, prompt=text, truncate_prompt_tokens=3, echo=True)
    assert answer["choices"][0]["text"].startswith(" world and the")


def test_longest_prompt() -> None:
    def longest(**fields: Any) -> int | None:
        return ChatRequest.parse({"messages": LONG, **fields}).longest_prompt(100)

    assert longest() is None
    assert longest(truncate_prompt_tokens=7, max_tokens=99) == 7
    assert longest(truncate_prompt_tokens=-1) == 99, "whatever is generated, it is at least one token"
    assert longest(truncate_prompt_tokens=-1, max_tokens=99) == 1
    completion = CompletionRequest.parse({"prompt": "a", "truncate_prompt_tokens": -1})
    assert completion.longest_prompt(100) == 84, "16 tokens unless told"
    scored = CompletionRequest.parse({"prompt": "a", "truncate_prompt_tokens": -1, "max_tokens": 0, "echo": True})
    assert scored.longest_prompt(100) == 100
    with pytest.raises(InvalidParameter, match="leave no room"):
        longest(truncate_prompt_tokens=-1, max_tokens=100)


@pytest.mark.parametrize("wrong", [0, -2, "5", True, 2**31])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_numbers(http: httpx.Client, path: str, wrong: Any) -> None:
    body = {"messages": LONG} if "chat" in path else {"prompt": "a"}
    response = http.post(path, json={**body, "truncate_prompt_tokens": wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_what_is_cached_is_told_of_what_was_read(http: httpx.Client) -> None:
    """Two questions that differ in the kept part: the place is that in the message as it was sent."""
    last = "of these days, and so on and so forth, until it ends"
    first, second = ("left out, and then " * 3 + f"this is the {number} {last}" for number in ("third", "fourth"))
    fields = {"truncate_prompt_tokens": 90, "cache_report": True, "cache_salt": "cut"}
    messages = [{"role": "user", "content": first}]
    whole = post(http, "/v1/chat/completions", messages=messages, cache_salt="whole", cache_report=True)
    post(http, "/v1/chat/completions", messages=messages, **fields)
    again = post(http, "/v1/chat/completions", messages=messages, **fields)["cache_report"]
    assert again["prompt_tokens"] == 90 < whole["cache_report"]["prompt_tokens"]
    assert (again["reason"], again["cached_tokens"]) == ("complete", 80)
    other = [{"role": "user", "content": second}]
    longer = post(http, "/tokenize", messages=other)["count"] - whole["usage"]["prompt_tokens"]
    asked = {"messages": other, **fields, "truncate_prompt_tokens": 90 + longer}  # so that it begins at the same word
    for report in (
        post(http, "/v1/cache/explain", **asked),
        post(http, "/v1/chat/completions", **asked)["cache_report"],
    ):
        assert report["reason"] == "differs"
        difference = report["difference"]
        assert difference["message"] == 0
        assert second[difference["character"] :].strip().startswith("fourth")
        assert difference["token"] < 90 - len(last) / 2, "of those that were read"

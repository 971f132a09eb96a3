"""/v1/chat/completions through OpenAI's own client, and as bytes on the wire."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.serving import MODEL, sse_events
from trunkline.models.tokenizer import Tokenizer

HELLO: Any = [{"role": "user", "content": "hello world"}]


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 12, **fields}
    )


def raw(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 12, **fields}
    return http.post("/v1/chat/completions", json=body)


def chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = raw(http, stream=True, **fields)
    assert response.status_code == 200, response.text
    *events, done = sse_events(response.text)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_answer_has_what_the_specification_requires(http: httpx.Client) -> None:
    body = raw(http).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert choice["message"]["role"] == "assistant"
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_alias_is_echoed(client: openai.OpenAI) -> None:
    assert chat(client, model="alias/of-tiny").model == "alias/of-tiny"


def test_same_prompt_again_finds_all_whole_pages_but_that_of_the_last_token(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "a page holds sixteen tokens; this message has a few pages of them"}]
    first = chat(client, messages=messages).usage
    again = chat(client, messages=messages).usage
    assert first.prompt_tokens > 32
    assert again.prompt_tokens_details.cached_tokens == (first.prompt_tokens - 1) // 16 * 16


def test_stream_begins_with_roles_and_ends_with_reasons(http: httpx.Client) -> None:
    events = chunks(http, n=3, seed=1, temperature=1)
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        assert "usage" not in event
        assert event["choices"]
    roles = [event["choices"][0] for event in events[:3]]
    assert [choice["index"] for choice in roles] == [0, 1, 2]
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in roles)
    for index in range(3):
        own = [choice for event in events[3:] for choice in event["choices"] if choice["index"] == index]
        assert all("role" not in choice["delta"] for choice in own)
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["delta"] == {}
        assert own[-1]["finish_reason"] == "length"


def test_stream_and_plain_answer_are_the_same(http: httpx.Client) -> None:
    events = chunks(http, stream_options={"include_usage": True})
    plain = raw(http).json()
    assert text_of(events) == plain["choices"][0]["message"]["content"]
    *others, last = events
    assert all(event["usage"] is None for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_continuous_usage_counts_up(http: httpx.Client) -> None:
    events = chunks(http, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_streaming_headers(http: httpx.Client) -> None:
    response = raw(http, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


def test_openai_stream_helper_accumulates(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    fields: Any = {"logit_bias": {str(tokenizer.eos_token_ids[0]): 100}, "extra_body": {"min_tokens": 8}}
    with client.chat.completions.stream(model=MODEL, messages=HELLO, temperature=0, n=2, **fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.role for choice in final.choices] == ["assistant", "assistant"]
    assert final.choices[0].message.content == chat(client, **fields).choices[0].message.content != ""


def test_same_seed_same_text(client: openai.OpenAI) -> None:
    def texts(**fields: Any) -> list[str]:
        return [choice.message.content for choice in chat(client, temperature=1, max_tokens=24, **fields).choices]

    three = texts(seed=7, n=3)
    assert texts(seed=7, n=3) == three
    assert texts(seed=8) == three[1:2], "choice i of n has the seed + i"
    assert len(set(three)) == 3
    assert texts() != texts(), "without a seed every request has its own"


def test_usage_counts_the_prompt_once_and_all_choices(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "long enough to find a page in the cache"}]
    chat(client, messages=messages)
    one, four = chat(client, messages=messages).usage, chat(client, messages=messages, n=4).usage
    assert four.prompt_tokens_details.cached_tokens == one.prompt_tokens_details.cached_tokens > 0
    assert four.prompt_tokens == one.prompt_tokens
    assert four.completion_tokens == 4 * one.completion_tokens


def test_logprobs(http: httpx.Client) -> None:
    choice = raw(http, logprobs=True, top_logprobs=3, skip_special_tokens=False).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 12
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace")
    assert text == choice["message"]["content"]
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0], "greedy: the chosen token is the likeliest"


def test_logprobs_without_top_logprobs(http: httpx.Client) -> None:
    entries = raw(http, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_streamed_logprobs_are_all_there(http: httpx.Client) -> None:
    plain = raw(http, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    events = chunks(http, logprobs=True, top_logprobs=1)
    streamed = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == plain


def greedy_bytes(http: httpx.Client, tokenizer: Tokenizer) -> bytes:
    """What the model says to HELLO, before decoding."""
    ids = raw(http, return_token_ids=True, max_tokens=40).json()["choices"][0]["token_ids"]
    return b"".join(map(tokenizer.token_bytes, ids))


def test_stop_string_is_cut_and_never_leaks(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = raw(http, max_tokens=40).json()["choices"][0]["message"]["content"]
    stop = text[20:23]  # spans tokens
    at = text.index(stop)
    body = raw(http, max_tokens=40, stop=[stop, "never said"], return_token_ids=True).json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == text[:at]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    used = b"".join(map(tokenizer.token_bytes, choice["token_ids"])).decode("utf-8", "replace")
    assert stop in used
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"]) < 40
    events = chunks(http, max_tokens=40, stop=stop)
    assert text_of(events) == text[:at]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    kept = raw(http, max_tokens=40, stop=stop, include_stop_str_in_output=True).json()
    assert kept["choices"][0]["message"]["content"] == text[: at + len(stop)]


def test_stop_token_ends_the_text_unseen(http: httpx.Client) -> None:
    ids = raw(http, return_token_ids=True).json()["choices"][0]["token_ids"]
    choice = raw(http, stop_token_ids=[ids[5]], return_token_ids=True).json()["choices"][0]
    end = ids.index(ids[5]) + 1
    assert choice["token_ids"] == ids[:end]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ids[5]


def test_characters_are_never_split(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """The bias makes the model write the four bytes of an emoji, each a token, over and over."""
    bias = {str(byte): 100 for byte in "🦊".encode()}
    events = chunks(http, logit_bias=bias, max_tokens=64, temperature=1, seed=3)
    plain = raw(http, logit_bias=bias, max_tokens=64, temperature=1, seed=3).json()["choices"][0]["message"]["content"]
    assert text_of(events) == plain
    assert set(bytes(plain.replace("\N{REPLACEMENT CHARACTER}", ""), "utf-8")) <= set("🦊".encode())


def test_content_parts_and_developer_role_read_like_plain_text(http: httpx.Client) -> None:
    plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    other = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    ids = [
        raw(http, messages=messages, return_token_ids=True).json()["prompt_token_ids"] for messages in (plain, other)
    ]
    assert ids[0] == ids[1]


def test_own_answers_are_accepted_as_history(http: httpx.Client) -> None:
    said = raw(http).json()["choices"][0]["message"]
    history = [*HELLO, {**said, "annotations": [], "audio": None}, {"role": "user", "content": "go on"}]
    assert raw(http, messages=history).status_code == 200


def test_continue_final_message(http: httpx.Client, tokenizer: Tokenizer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "hello the"}]
    body = raw(http, messages=messages, continue_final_message=True, return_token_ids=True).json()
    assert tokenizer.decode(body["prompt_token_ids"], skip_special_tokens=False).endswith("assistant\nhello the")


def test_ignore_eos_and_min_tokens(http: httpx.Client, tokenizer: Tokenizer) -> None:
    eos = {str(tokenizer.eos_token_ids[0]): 100}
    assert raw(http, logit_bias=eos).json()["usage"]["completion_tokens"] == 1
    ended = raw(http, logit_bias=eos).json()["choices"][0]
    assert (ended["message"]["content"], ended["finish_reason"], ended["stop_reason"]) == ("", "stop", None)
    assert raw(http, logit_bias=eos, min_tokens=5).json()["usage"]["completion_tokens"] == 6
    assert raw(http, logit_bias=eos, ignore_eos=True).json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": None},
        {"tools": None, "tool_choice": "none", "parallel_tool_calls": None},
        {"response_format": {"type": "text"}},
        {"functions": [], "function_call": "none"},
        {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
        {"modalities": ["text"], "audio": None, "web_search_options": None, "reasoning_effort": "low"},
        {"max_completion_tokens": 3, "max_tokens": None, "stop": None, "seed": None, "n": None, "logprobs": None},
        {"something_new": 1},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client, harmless: dict[str, Any]) -> None:
    assert raw(http, **harmless).status_code == 200


def test_longer_than_the_model(http: httpx.Client, client: openai.OpenAI) -> None:
    for stream in (False, True):
        response = raw(http, messages=[{"role": "user", "content": "x" * 20_000}], stream=stream)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "maximum context length is 8192 tokens" in error["message"]
        assert "resulted in 200" in error["message"]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(client, messages=[{"role": "user", "content": "x" * 5_000_000}])


def test_room_is_clamped_to_the_context(http: httpx.Client) -> None:
    response = raw(http, messages=[{"role": "user", "content": "x" * 8_150}], max_tokens=2_000_000, ignore_eos=True)
    usage = response.json()["usage"]
    assert usage["total_tokens"] == 8_192

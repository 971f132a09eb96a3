"""/v1/completions: prompts of all four kinds, echo, and the legacy log-probabilities."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.serving import MODEL, sse_events
from trunkline.models.tokenizer import Tokenizer


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "hello world", "temperature": 0, "max_tokens": 8, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "prompt": "hello world", "temperature": 0, "max_tokens": 8, "stream": True, **fields}
    *events, done = sse_events(http.post("/v1/completions", json=body).text)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_sixteen_tokens_unless_told(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_text_and_token_ids_are_the_same_prompt(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world")
    text = complete(http)["choices"][0]["text"]
    assert complete(http, prompt=ids)["choices"][0]["text"] == text
    for prompts in (["hello world", "hello"], [ids, tokenizer.encode("hello")]):
        choices = complete(http, prompt=prompts)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["text"] == text


def test_choices_are_ordered_by_prompt_then_n(http: httpx.Client) -> None:
    settings = {"temperature": 1, "seed": 5, "n": 2}
    both = complete(http, prompt=["hello", "world"], **settings)
    alone = [complete(http, prompt=prompt, **settings) for prompt in ("hello", "world")]
    assert [choice["text"] for choice in both["choices"]] == [
        choice["text"] for answer in alone for choice in answer["choices"]
    ]
    assert both["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert both["usage"]["completion_tokens"] == sum(answer["usage"]["completion_tokens"] for answer in alone)


def test_echo(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = complete(http)["choices"][0]["text"]
    assert complete(http, echo=True)["choices"][0]["text"] == "hello world" + text
    assert (
        complete(http, echo=True, prompt=tokenizer.encode("hello world"))["choices"][0]["text"] == "hello world" + text
    )
    assert "".join(event["choices"][0]["text"] for event in chunks(http, echo=True)) == "hello world" + text


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt(http: httpx.Client, tokenizer: Tokenizer, stream: bool) -> None:
    """As lm-eval does it: no token is generated, and every token of the prompt but the first is scored."""
    fields = {"prompt": "hello world and the", "echo": True, "logprobs": 2, "max_tokens": 0}
    answer = chunks(http, **fields)[0] if stream else complete(http, **fields)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    ids = tokenizer.encode("hello world and the")
    assert choice["text"] == "hello world and the"
    assert choice["finish_reason"] == "length"
    assert (
        logprobs["tokens"]
        == [tokenizer.token_text(token_id) for token_id in ids]
        == ["hello", " world", " and", " the"]
    )
    assert logprobs["text_offset"] == [0, 5, 11, 15]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for token, logprob, top in zip(
        logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert logprob < 0
        assert top[token] == logprob
        assert 2 <= len(top) <= 3


def test_scores_of_a_prompt_are_those_of_generating_it(http: httpx.Client, tokenizer: Tokenizer) -> None:
    generated = complete(http, logprobs=1, return_token_ids=True)["choices"][0]
    prompt = tokenizer.encode("hello world") + generated["token_ids"]
    scored = complete(http, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    own = len(generated["token_ids"])
    assert scored["logprobs"]["token_logprobs"][-own - 1 : -1] == pytest.approx(
        generated["logprobs"]["token_logprobs"], abs=1e-5
    )
    assert len(scored["logprobs"]["tokens"]) == len(prompt) + 1


def test_logprobs_of_a_stream(http: httpx.Client) -> None:
    plain = complete(http, logprobs=1, echo=True)["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {name: [] for name in plain}
    for event in chunks(http, logprobs=1, echo=True):
        for name, values in event["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == plain


def test_stream_with_usage(http: httpx.Client) -> None:
    *events, last = chunks(http, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)


def test_text_that_looks_like_a_special_token_is_one(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = complete(http, prompt="<|im_end|>", return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert ids == tokenizer.encode("<|im_end|>")
    assert len(ids) == 1


def test_salts_keep_prefixes_apart(http: httpx.Client) -> None:
    prompt = "a prompt of more than two pages of sixteen tokens each, salted"
    cached = [
        complete(http, prompt=prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("one", "two", "one")
    ]
    assert cached[:2] == [0, 0]
    assert cached[2] >= 32


def likeliest(choices: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The n choices with the highest mean log-probability per token, likeliest first."""

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    return sorted(choices, key=mean, reverse=True)[:n]


def test_best_of_returns_the_likeliest(http: httpx.Client) -> None:
    settings = {"temperature": 1, "seed": 3, "prompt": ["hello", "world and"], "logprobs": 1}
    everything = complete(http, n=6, **settings)
    expected = likeliest(everything["choices"][:6], 2) + likeliest(everything["choices"][6:], 2)
    best = complete(http, n=2, best_of=6, **settings)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    for choice, same in zip(best["choices"], expected, strict=True):
        assert choice["text"] == same["text"]
        assert choice["logprobs"] == same["logprobs"]
    assert best["usage"] == everything["usage"], "what is not returned was generated, too"


def test_best_of_goes_by_the_mean_not_the_sum(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """Texts of different lengths: the sum would prefer the short ones."""
    settings: dict[str, Any] = {"temperature": 1, "seed": 1, "max_tokens": 12, "logprobs": 0, "n": 12}
    settings["logit_bias"] = {str(tokenizer.eos_token_ids[0]): 6}
    choices = complete(http, **settings)["choices"]
    (best,) = likeliest(choices, 1)
    sums = {choice["index"]: sum(choice["logprobs"]["token_logprobs"]) for choice in choices}
    assert max(sums, key=sums.__getitem__) != best["index"], "else this shows nothing"
    (choice,) = complete(http, **settings | {"n": 1, "best_of": 12, "logprobs": None})["choices"]
    assert choice["text"] == best["text"]


def test_best_of_shows_logprobs_only_if_asked(http: httpx.Client) -> None:
    best = complete(http, best_of=3, temperature=1, seed=3, return_token_ids=True)["choices"][0]
    shown = complete(http, best_of=3, temperature=1, seed=3, logprobs=2)["choices"][0]
    assert best["logprobs"] is None
    assert len(best["token_ids"]) == len(shown["logprobs"]["tokens"]) == 8
    assert shown["text"] == best["text"]


def test_best_of_with_echo(http: httpx.Client) -> None:
    settings = {"temperature": 1, "seed": 3, "best_of": 3, "echo": True}
    plain = complete(http, **settings)["choices"][0]
    scored = complete(http, logprobs=1, **settings)["choices"][0]
    assert plain["text"] == scored["text"]
    assert plain["text"].startswith("hello world")
    assert scored["logprobs"]["tokens"][:2] == ["hello", " world"]


def test_best_of_as_many_as_are_returned_picks_nothing(http: httpx.Client) -> None:
    settings = {"temperature": 1, "seed": 3, "n": 3}
    texts = [choice["text"] for choice in complete(http, **settings)["choices"]]
    assert [choice["text"] for choice in complete(http, best_of=3, **settings)["choices"]] == texts
    assert chunks(http, n=1, best_of=1)

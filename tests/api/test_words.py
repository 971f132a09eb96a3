"""`allowed_token_ids` and `bad_words`, over HTTP and offline."""

from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL
from tests.tiny import TOKEN_IDS, VOCAB_SIZE
from trunkline import LLM, SamplingParams
from trunkline.api.bad_words import bad_word_ids
from trunkline.errors import InvalidParameter
from trunkline.models.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "hello world"}]}
FIXED = {"temperature": 1, "seed": 3, "ignore_eos": True}


def answer(http: httpx.Client, path: str, **body: Any) -> tuple[str, list[int]]:
    """Text and token ids of the first choice."""
    response = http.post(path, json={"model": MODEL, "max_tokens": 40, "return_token_ids": True, **FIXED, **body})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice.get("text") or choice["message"]["content"], choice["token_ids"]


def refused(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"model": MODEL, "prompt": "hello", **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


ROUTES = [("/v1/completions", {"prompt": "hello world"}), ("/v1/chat/completions", CHAT)]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_only_tokens_that_are_allowed(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    allowed = [65, 66, TOKEN_IDS["Ġthe"]]
    text, token_ids = answer(http, path, allowed_token_ids=allowed, **body)
    assert set(token_ids) == set(allowed) and text.replace(" the", "").strip("AB") == ""


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_words_that_are_not_written(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Every word of two letters but these: each was somewhere in a text without the list."""
    letters = {"allowed_token_ids": [65, 66, 67], **body}
    free, _ = answer(http, path, **letters)
    bad = sorted({free[at : at + 2] for at in range(len(free) - 1)} - {"AB", "BC", "CA", "AA"})
    assert len(bad) >= 3
    text, _ = answer(http, path, bad_words=bad, **letters)
    assert len(text) == 40 and not any(word in text for word in bad)


def test_every_choice_keeps_to_it(http: httpx.Client) -> None:
    """They share a prompt, and go on by themselves."""
    body = {"model": MODEL, "prompt": "hello", "n": 3, "max_tokens": 12, "allowed_token_ids": [65, 66, 67, 68], **FIXED}

    def texts(**more: Any) -> list[str]:
        return [choice["text"] for choice in http.post("/v1/completions", json={**body, **more}).json()["choices"]]

    free = texts()
    most = max("ABCD", key="".join(free).count)
    bound = texts(bad_words=[most])
    assert most in "".join(free) and most not in "".join(bound)
    assert len(set(bound)) == 3 and all(len(text) == 12 for text in bound)


def test_nothing_is_asked(http: httpx.Client) -> None:
    plain = answer(http, "/v1/completions", prompt="hello")
    assert answer(http, "/v1/completions", prompt="hello", allowed_token_ids=None, bad_words=[]) == plain


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "1 to"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", f"token ids from 0 to {VOCAB_SIZE - 1}"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]", "an integer"),
        ({"allowed_token_ids": [65], "bad_words": ["A"]}, "allowed_token_ids", "only ids that 'bad_words'"),
        ({"bad_words": "A"}, "bad_words", "an array"),
        ({"bad_words": ["A", ""]}, "bad_words", "strings of 1 to"),
        ({"bad_words": ["  "]}, "bad_words", "whitespace alone"),
        ({"bad_words": ["A"], "guided_regex": "[0-9]"}, "bad_words", "leave one of them out"),
        ({"allowed_token_ids": [65], "response_format": {"type": "json_object"}}, "allowed_token_ids", "leave one"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(http, **body)
    assert error["param"] == param and words in error["message"], error


def test_spellings(tokenizer: Tokenizer) -> None:
    """At the beginning of a text and after a space; each once."""
    the = TOKEN_IDS["Ġthe"]
    encode = tokenizer.encode
    assert bad_word_ids(tokenizer, ["the", " the"]) == (tuple(encode("the")), (the,))
    assert bad_word_ids(tokenizer, ["hello world"]) == (tuple(encode("hello world")), tuple(encode(" hello world")))
    assert bad_word_ids(tokenizer, []) == ()
    with pytest.raises(InvalidParameter, match="'bad_words' is"):
        bad_word_ids(tokenizer, ["the", "\n"])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offline_and_on_the_triton_kernels(tiny: Any, device: str) -> None:
    """With drafts and, on what would be a GPU, a step in flight: the same texts."""
    flags: dict[str, Any] = {"dtype": "float32", "num_pages": 64, "threads": 1, "max_model_len": 256}
    asked = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True, allowed_token_ids=(65, 66, 67)),
        SamplingParams(
            temperature=0, max_tokens=16, ignore_eos=True, allowed_token_ids=(65, 66, 67), bad_words=("AA", "B")
        ),
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    ]
    with LLM(str(tiny), device="cpu", **flags) as llm:
        free, bound, _ = expected = [output.text for output in llm.generate(["hello"] * 3, asked)]
    assert "B" in free and set(free) <= set("ABC") and set(bound) <= set("AC") and "AA" not in bound
    with LLM(str(tiny), device=device, **flags) as llm:
        assert [output.text for output in llm.generate(["hello"] * 3, asked)] == expected

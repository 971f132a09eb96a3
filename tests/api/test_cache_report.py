"""The explanations, word for word. The reports are made by hand; tests/api/test_cache_routes.py has real ones."""

from array import array
from typing import Any

import pytest

from trunkline.api.cache_report import Difference, Eviction, ago, explain, ids_of, readable
from trunkline.api.prompt_map import ReadPrompt, Source, Span
from trunkline.messages import CacheReport
from trunkline.models.tokenizer import Tokenizer

TEXT = "<|im_start|>system\nToday is the 3rd of May.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"


def tokens(tokenizer: Tokenizer, text: str) -> bytes:
    return array("i", tokenizer.encode(text, add_special_tokens=False)).tobytes()


def make_prompt(tokenizer: Tokenizer, text: str = TEXT, *, is_chat: bool = True) -> ReadPrompt:
    spans = [
        Span(start, start + len(words), Source(f"messages[{index}]", message=index, role=role), 0)
        for index, (role, words) in enumerate((("system", "Today is the 3rd of May."), ("user", "hello")))
        if (start := text.find(words)) >= 0
    ]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return ReadPrompt(token_ids, tokenizer, text=text if is_chat else None, spans=lambda: spans)


def sentence(tokenizer: Tokenizer, **report: Any) -> str:
    made = CacheReport(**{"prompt_tokens": 120, "cached_tokens": 48, "cached_by_tier": {"device": 48}, **report})
    return explain(made, make_prompt(tokenizer), page_size=16).sentence


NOTHING = {"cached_tokens": 0, "cached_by_tier": {}}


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            {"reason": "complete", "cached_tokens": 112},
            (
                "112 of the 120 prompt tokens are cached, which is all that can be: whole pages of 16 tokens that end before the last"
                " prompt token, which is always computed."
            ),
        ),
        (
            {"reason": "complete", "cached_tokens": 1, "prompt_tokens": 2},
            (
                "1 of the 2 prompt tokens is cached, which is all that can be: whole pages of 16 tokens that end before the last"
                " prompt token, which is always computed."
            ),
        ),
        ({"reason": "complete", "cached_tokens": 120}, "120 of the 120 prompt tokens are cached."),
        (
            {"reason": "short", "prompt_tokens": 9, **NOTHING},
            (
                "None of the 9 prompt tokens is cached, and can't be: only whole pages of 16 tokens that end before the last one are"
                " kept."
            ),
        ),
        (
            {"reason": "short", "prompt_tokens": 1, **NOTHING},
            (
                "The prompt's one token is not cached, and can't be: only whole pages of 16 tokens that end before the last one are"
                " kept."
            ),
        ),
        (
            {"reason": "evicted", "seconds_ago": 12.9, "cause": "admission"},
            (
                "48 of the 120 prompt tokens are cached. What comes after them was evicted 12 seconds ago to make room for another"
                " prompt."
            ),
        ),
        (
            {"reason": "evicted", "seconds_ago": 0.5, "cause": "growth", **NOTHING},
            (
                "None of the 120 prompt tokens is cached. The beginning was evicted less than a second ago to make room for what"
                " running requests generate."
            ),
        ),
        (
            {"reason": "evicted", "seconds_ago": 600, "cause": "quota"},
            (
                "48 of the 120 prompt tokens are cached. What comes after them was evicted 10 minutes ago since this tenant had more"
                " than its share of the cache (--tenant-cache-share)."
            ),
        ),
        (
            {"reason": "evicted", "seconds_ago": 1, "cause": "flush"},
            "48 of the 120 prompt tokens are cached. What comes after them was flushed 1 second ago.",
        ),
        (
            {"reason": "computing"},
            "48 of the 120 prompt tokens are cached. What comes after them is being computed by another request right now.",
        ),
        (
            {"reason": "namespace", **NOTHING},
            (
                "None of the 120 prompt tokens is cached. The beginning is cached under another cache_salt or adapter, and these never"
                " share."
            ),
        ),
        (
            {"reason": "unseen"},
            "48 of the 120 prompt tokens are cached. What comes after them was not read here before, or too long ago to remember.",
        ),
        (
            {"reason": "unseen", **NOTHING},
            (
                "None of the 120 prompt tokens is cached. Nothing that begins like this was read here before, or it is too long ago to"
                " remember."
            ),
        ),
        (
            {"reason": "prompt_logprobs", **NOTHING},
            "The log-probabilities of the prompt are wanted, and the cache holds none: all 120 prompt tokens are computed.",
        ),
        (
            {"reason": "disabled", **NOTHING},
            "Prefix caching is off (--no-enable-prefix-caching): all 120 prompt tokens are computed.",
        ),
        (
            {"reason": "disabled", "prompt_tokens": 1, **NOTHING},
            "Prefix caching is off (--no-enable-prefix-caching): the prompt's one token is computed.",
        ),
        (
            {"reason": "computing", "cached_by_tier": {"device": 16, "host": 16, "disk": 16}},
            (
                "48 of the 120 prompt tokens are cached (16 on the device, 16 in host memory, 16 on disk). What comes after them is being"
                " computed by another request right now."
            ),
        ),
    ],
)
def test_sentence(tokenizer: Tokenizer, report: dict[str, Any], words: str) -> None:
    assert sentence(tokenizer, **report) == words


def differs(tokenizer: Tokenizer, prompt: ReadPrompt, at: str, cached: str) -> tuple[str, Difference]:
    """The explanation if the prompt differs from `at` on, where `cached` is cached."""
    text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    position = len(tokenizer.encode(text[: text.index(at)], add_special_tokens=False))
    report = CacheReport(
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=0,
        reason="differs",
        position=position,
        expected=tokens(tokenizer, cached)[: 8 * 4],
    )
    explained = explain(report, prompt, page_size=16)
    assert explained.difference is not None
    assert explained.difference.token == position
    return explained.sentence, explained.difference


def test_difference_in_a_message(tokenizer: Tokenizer) -> None:
    words, difference = differs(tokenizer, make_prompt(tokenizer), "3rd", "4th of May.")
    assert words == (
        "None of the 35 prompt tokens is cached. The nearest cached prompt is the same for 16 tokens; then, at character 13 of"
        " messages[0] (system), it has '4th of May' where this one has '3rd of May'."
    )
    assert (difference.message, difference.role, difference.character) == (0, "system", 13)
    assert (difference.cached, difference.sent) == ("4th of May", "3rd of May")


def test_difference_in_the_template_shows_special_tokens(tokenizer: Tokenizer) -> None:
    words, difference = differs(tokenizer, make_prompt(tokenizer), "<|im_end|>\n<|im_start|>user", "<|eos|>")
    assert words == (
        "None of the 35 prompt tokens is cached. The nearest cached prompt is the same for 25 tokens; then, in the template's own"
        " text between messages[0] and messages[1], it has '<|eos|>' where this one has '<|im_end|>\\n<|im_start|>user\\nhello'."
    )
    assert (difference.message, difference.role, difference.character) == (None, None, None)


def test_difference_without_messages_has_no_place(tokenizer: Tokenizer) -> None:
    words, difference = differs(tokenizer, make_prompt(tokenizer, "a prompt", is_chat=False), " prompt", "\0")
    assert words == (
        "None of the 8 prompt tokens is cached. The nearest cached prompt is the same for 1 token; then it has '\\x00' where this"
        " one has ' prompt'."
    )
    assert difference.place is None


def test_difference_within_a_character(tokenizer: Tokenizer) -> None:
    prompt = ReadPrompt([*"é".encode()], tokenizer)
    report = CacheReport(
        prompt_tokens=2, cached_tokens=0, reason="differs", position=1, expected=array("i", [0xA8, 0x21]).tobytes()
    )
    difference = explain(report, prompt, page_size=16).difference
    assert difference is not None
    assert (difference.cached, difference.sent) == ("\\xa8!", "\\xa9")


def test_long_differences_are_cut_in_the_sentence_only(tokenizer: Tokenizer) -> None:
    long = "<|im_start|>" * 8
    words, difference = differs(tokenizer, make_prompt(tokenizer), "hello", long)
    assert difference.cached == long
    assert "..." in words
    assert len(words) < 400


def test_eviction_is_told_in_numbers_too(tokenizer: Tokenizer) -> None:
    report = CacheReport(prompt_tokens=32, cached_tokens=0, reason="evicted", seconds_ago=12.34567899, cause="growth")
    explained = explain(report, make_prompt(tokenizer), page_size=16)
    assert explained.eviction == Eviction(seconds_ago=12.345679, cause="growth")
    assert explained.difference is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "less than a second ago"),
        (0.99, "less than a second ago"),
        (1, "1 second ago"),
        (119.9, "119 seconds ago"),
        (120, "2 minutes ago"),
        (7199, "119 minutes ago"),
        (7200, "2 hours ago"),
        (1e6, "277 hours ago"),
    ],
)
def test_ago(seconds: float, words: str) -> None:
    assert ago(seconds) == words


def test_readable(tokenizer: Tokenizer) -> None:
    assert readable(tokenizer.encode("héllo <|im_end|>☃"), tokenizer) == "héllo <|im_end|>☃"
    assert readable(tokenizer.encode("☃")[:2], tokenizer) == "\\xe2\\x98"
    assert readable([10**6], tokenizer) == "", "a row of the model that has no token"
    assert ids_of(tokens(tokenizer, "hi")) == [104, 105]

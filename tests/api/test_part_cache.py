"""Texts whose parts come again: the same ids as those of the whole, each part tokenized once for each owner."""

import asyncio
import threading

import pytest

from tests.tiny import TOKEN_IDS
from trunkline.api import part_cache
from trunkline.api.part_cache import PART_OVERHEAD, PartCache
from trunkline.errors import InvalidParameter
from trunkline.models.tokenizer import Tokenizer

SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
CHAT = SYSTEM + "<|im_start|>user\nHi, café!<|im_end|>\n<|im_start|>assistant\n"


class Counting:
    """A tokenizer that tells what it was asked for, and by which thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encoded: list[str] = []
        self.threads: set[int] = set()

    def cut(self, text: str) -> list[str]:
        return self.tokenizer.cut(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        self.threads.add(threading.get_ident())
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def counting(tokenizer: Tokenizer) -> Counting:
    return Counting(tokenizer)


def make_cache(counting: Counting, max_characters: int = 100_000) -> PartCache:
    return PartCache(counting, max_characters=max_characters)  # type: ignore[arg-type]


async def test_ids_are_those_of_the_whole_text(counting: Counting, tokenizer: Tokenizer) -> None:
    cache = make_cache(counting)
    for text in (CHAT, CHAT, SYSTEM, "", "<|im_end|>", "no marks"):
        assert await cache.encode(text, owner="a") == tokenizer.encode(text, add_special_tokens=False)
    assert TOKEN_IDS["<|im_end|>"] in await cache.encode(CHAT, owner="a")


async def test_a_part_is_tokenized_once_for_each_owner(counting: Counting) -> None:
    cache = make_cache(counting)
    await cache.encode(CHAT, owner="a")
    assert counting.encoded.count("system\nBe brief.") == counting.encoded.count("<|im_end|>") == 1
    counting.encoded.clear()
    await cache.encode(SYSTEM + "<|im_start|>user\nAnd now?<|im_end|>\n", owner="a")
    assert counting.encoded == ["user\nAnd now?"]
    counting.encoded.clear()
    await cache.encode(SYSTEM, owner="b")
    assert "system\nBe brief." in counting.encoded, "how long it takes tells nothing of another owner's texts"


async def test_what_was_not_used_for_longest_is_forgotten(counting: Counting) -> None:
    cache = make_cache(counting, max_characters=2 * (PART_OVERHEAD + 10))
    for text in ("one", "two", "one", "three", "one"):
        await cache.encode(text, owner="a")
    assert counting.encoded == ["one", "two", "three"]
    await cache.encode("two", owner="a")
    assert counting.encoded[-1] == "two"
    await cache.encode("x" * 10_000, owner="a")  # more than there is room for
    assert await cache.encode("one", owner="a") == await cache.encode("one", owner="a")


async def test_a_long_text_is_tokenized_in_a_thread_unless_it_is_known(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_cache, "LONG_TEXT", 50)
    cache, long = make_cache(counting), "long " * 20
    both = await asyncio.gather(cache.encode(long, owner="a"), cache.encode(long, owner="a"))
    assert both[0] == both[1] == counting.tokenizer.encode(long, add_special_tokens=False)
    assert threading.get_ident() not in counting.threads
    counting.encoded.clear()
    await cache.encode(long + "<|im_end|>", owner="a")
    assert counting.encoded == ["<|im_end|>"]
    assert threading.get_ident() in counting.threads


async def test_half_a_surrogate_pair_is_refused_with_its_place_in_the_whole_text(counting: Counting) -> None:
    with pytest.raises(InvalidParameter, match="character 12 is U\\+D800"):
        await make_cache(counting).encode("<|im_end|>ab\ud800", owner="a")

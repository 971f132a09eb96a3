"""Token ids of texts whose parts come again: system messages, tools, the earlier turns of a chat. Knows no requests.

    cache = PartCache(tokenizer)
    await cache.encode("<|im_start|>system\\n…<|im_end|>\\n<|im_start|>user\\nHi<|im_end|>\\n", owner=("tenant", "salt"))

A text is cut where its tokenizer cuts every text, at special tokens (Tokenizer.cut), so the ids are exactly those of the
whole. Parts are remembered for each owner by itself: how long a request takes tells nobody what others have sent.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import chain

from trunkline.models.tokenizer import Tokenizer

# Longer texts are tokenized in a thread, so that other requests' tokens keep flowing meanwhile.
LONG_TEXT = 20_000  # characters
MAX_CHARACTERS = 4 * 2**20  # of all parts that are remembered, with their ids some 20 to 40 MiB
PART_OVERHEAD = 256  # characters: what else an entry takes


class PartCache:
    """The parts that were used last, up to `max_characters` of them. For one event loop."""

    def __init__(self, tokenizer: Tokenizer, *, max_characters: int = MAX_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._room = max_characters
        self._known: OrderedDict[tuple[Hashable, str], array[int]] = OrderedDict()

    async def encode(self, text: str, *, owner: Hashable) -> list[int]:
        """As Tokenizer.encode without adding special tokens.

        owner  whose text it is, e.g. a tenant

        Raises InvalidParameter for half a surrogate pair.
        """
        parts = self._tokenizer.cut(text)
        ids: dict[str, array[int]] = {}
        new: list[str] = []
        for part in dict.fromkeys(parts):
            if (known := self._known.get((owner, part))) is None:
                new.append(part)
            else:
                ids[part] = known
                self._known.move_to_end((owner, part))
        if new:
            is_long = sum(map(len, new)) >= LONG_TEXT
            made = await asyncio.to_thread(self._encode, new) if is_long else self._encode(new)
            for part, token_ids in made.items():
                ids[part] = token_ids
                self._remember(owner, part, token_ids)
        return list(chain.from_iterable(map(ids.__getitem__, parts)))

    def _encode(self, parts: Sequence[str]) -> dict[str, "array[int]"]:
        return {part: array("i", self._tokenizer.encode(part, add_special_tokens=False)) for part in parts}

    def _remember(self, owner: Hashable, part: str, token_ids: "array[int]") -> None:
        """As the one used last."""
        if (owner, part) not in self._known:
            self._room -= len(part) + PART_OVERHEAD
            while self._room < 0 and self._known:
                (_, oldest), _ = self._known.popitem(last=False)
                self._room += len(oldest) + PART_OVERHEAD
        self._known[owner, part] = token_ids
        self._known.move_to_end((owner, part))  # another request may have put it there meanwhile

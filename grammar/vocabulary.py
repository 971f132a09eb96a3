"""The tokens that a grammar is compiled for: their bytes, which of them are special, which end a text, how wide a mask is.

    vocabulary = Vocabulary(tokenizer, num_logits=49152, eos_token_ids=(0, 2))
    vocabulary.tokens[19556]       b"Hello"
    vocabulary.num_words           1536: a mask is int32 [1536], token i is bit i % 32 of word i // 32
    vocabulary.encode(b'{"a": 1}') the ids that the tokenizer itself would write

Knows no backend: each brings this into its library's own shape.
"""

import hashlib
import struct
from collections.abc import Iterable

from trunkline.models.tokenizer import Tokenizer

ANCHOR = "\n"  # put before a text whose first space must not be the tokenizer's own


class Vocabulary:
    """Immutable; any number of threads may use it at once.

    tokens         bytes of each id, 0 … num_logits-1. A special token has the bytes of its name, <|im_end|>; an id that
                   stands for nothing has b""
    special_ids    ids that are no text: no grammar allows one unless it names it
    eos_token_ids  ids that end a text, ascending; all of them special. May be empty
    num_logits     ids that the model can choose from
    num_words      32-bit words of a mask, ceil(num_logits / 32)
    fingerprint    SHA-256 of all of this, as hex: equal vocabularies have equal compiled grammars
    """

    def __init__(self, tokenizer: Tokenizer, num_logits: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.num_logits = num_logits
        self.num_words = (num_logits + 31) // 32
        self.eos_token_ids = tuple(sorted({token for token in eos_token_ids if 0 <= token < num_logits}))
        known = min(tokenizer.vocab_size, num_logits)
        special = {token for token in tokenizer.special_ids if 0 <= token < num_logits}
        self.special_ids = frozenset(special | set(self.eos_token_ids))
        self.tokens: tuple[bytes, ...] = tuple(tokenizer.token_bytes(token) for token in range(known)) + (b"",) * (
            num_logits - known
        )
        self.fingerprint = self._hash()
        self._special = {self.tokens[token]: token for token in sorted(self.special_ids, reverse=True)}

    def special_id(self, text: str) -> int | None:
        """The special token with this text; None: there is none."""
        return self._special.get(text.encode()) if text else None

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text that continues another one, as the tokenizer would write it; no special token is among them.

        Raises UnicodeDecodeError if it is no UTF-8, and ValueError if the tokenizer cannot write it there.
        """
        characters = text.decode()
        if not self._tokenizer.strips_leading_space:
            return self._tokenizer.encode(characters, add_special_tokens=False, parse_special=False)
        anchor = self._tokenizer.encode(ANCHOR, add_special_tokens=False, parse_special=False)
        ids = self._tokenizer.encode(ANCHOR + characters, add_special_tokens=False, parse_special=False)
        if ids[: len(anchor)] != anchor:
            raise ValueError(f"the tokenizer joins a line feed with {characters[:20]!r}")
        return ids[len(anchor) :]

    def _hash(self) -> str:
        digest = hashlib.sha256()
        lengths = [len(token) for token in self.tokens]
        digest.update(struct.pack(f"<Q{len(lengths)}I", self.num_logits, *lengths))
        digest.update(b"".join(self.tokens))
        for ids in (sorted(self.special_ids), list(self.eos_token_ids)):
            digest.update(struct.pack(f"<Q{len(ids)}I", len(ids), *ids))
        return digest.hexdigest()

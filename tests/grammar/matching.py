"""Helpers of the grammar tests: a small vocabulary, and whether a compiled grammar takes a text.

vocabulary = small_vocabulary()
compiled = LlguidanceBackend(vocabulary).compile(source)
accepts(compiled, vocabulary, '{"a": 1}')                # token by token, through the masks
allowed(compiled.matcher(), vocabulary)                  # {b"{", b'{"', …}
"""

import random
from collections.abc import Iterable, Mapping

import numpy as np

from trunkline.grammar.interface import CompiledGrammar, Matcher
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.models.tokenizer import Tokenizer

WORDS = (
    "hello",
    " hello",
    "name",
    "age",
    "true",
    "null",
    '{"',
    '": ',
    '": "',
    '":',
    '", "',
    '"}',
    "12",
    " {",
    "  ",
    "é",
)
SPECIAL = ("<|bos|>", "<|eos|>", "<|im_end|>")


class SmallTokenizer(Tokenizer):
    """Every byte is the token of its own number; then `words`; then `special`. Writes the longest token that fits."""

    def __init__(self, words: Iterable[str] = WORDS, special: Iterable[str] = SPECIAL) -> None:
        words, special = list(words), list(special)
        self._tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in [*words, *special]]
        self._ids = {token: number for number, token in enumerate(self._tokens[: 256 + len(words)]) if token}
        self._longest = max(map(len, self._ids))
        special_ids: Mapping[str, int] = {name: 256 + len(words) + index for index, name in enumerate(special)}
        super().__init__(
            vocab_size=len(self._tokens),
            special_ids=special_ids.values(),
            bos_token_id=special_ids.get("<|bos|>"),
            eos_token_ids=[special_ids[name] for name in ("<|eos|>", "<|im_end|>") if name in special_ids],
            special_tokens={},
            chat_template=None,
            strips_leading_space=False,
        )

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else b""

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return self.encode_bytes(text.encode())

    def encode_bytes(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            length = next(n for n in range(self._longest, 0, -1) if text[at : at + n] in self._ids)
            ids.append(self._ids[text[at : at + length]])
            at += length
        return ids


def small_vocabulary(num_logits: int | None = None, words: Iterable[str] = WORDS) -> Vocabulary:
    """Of a SmallTokenizer. `num_logits`: by default 16 more ids than there are tokens, as many models have."""
    tokenizer = SmallTokenizer(words)
    return Vocabulary(tokenizer, num_logits or tokenizer.vocab_size + 16, tokenizer.eos_token_ids)


def mask_of(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    """Ids that may come next. The row is full of garbage before."""
    row = np.full(vocabulary.num_words, -1431655766, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> set[bytes]:
    """Tokens that may come next, as bytes; end-of-text ids as their names."""
    return {vocabulary.tokens[token] for token in mask_of(matcher, vocabulary)}


def follow(matcher: Matcher, vocabulary: Vocabulary, token_ids: Iterable[int]) -> bool:
    """Accept these ids one by one, each only if the mask has it; False at the first that may not come."""
    for token in token_ids:
        in_mask = token in mask_of(matcher, vocabulary)
        assert matcher.count_valid([token]) == in_mask, "count_valid and the mask disagree"
        accepted = matcher.accept(token)
        assert accepted == in_mask, "accept and the mask disagree"
        if not accepted:
            return False
    return True


def accepts(compiled: CompiledGrammar, vocabulary: Vocabulary, text: str | bytes) -> bool:
    """Whether `text` as a whole follows the grammar, tokenized as the tokenizer would."""
    matcher = compiled.matcher()
    raw = text if isinstance(text, bytes) else text.encode()
    if not follow(matcher, vocabulary, vocabulary.encode(raw)):
        return False
    ends = bool(mask_of(matcher, vocabulary) & set(vocabulary.eos_token_ids))
    assert ends == matcher.is_complete, "end-of-text ids are not where the text may end"
    return ends


def takes(compiled: CompiledGrammar, vocabulary: Vocabulary, text: str) -> bool:
    """As `accepts`, without looking at the masks, in a tenth of the time."""
    matcher = compiled.matcher()
    return all(map(matcher.accept, vocabulary.encode(text.encode()))) and matcher.is_complete


def random_text(compiled: CompiledGrammar, vocabulary: Vocabulary, seed: int, most: int = 400) -> bytes | None:
    """A text whose tokens are drawn from the masks, all equally likely; None if it doesn't end within `most` tokens.

    Where the text may end, it ends with a probability of a third, so that it ends at all.
    """
    rng = random.Random(seed)
    matcher = compiled.matcher()
    text: list[bytes] = []
    for _ in range(most):
        ids = sorted(mask_of(matcher, vocabulary))
        others = [token for token in ids if token not in vocabulary.eos_token_ids]
        if len(others) < len(ids) and (not others or rng.random() < 1 / 3):
            return b"".join(text)
        token = rng.choice(others)
        assert matcher.accept(token)
        text.append(vocabulary.tokens[token])
    return None

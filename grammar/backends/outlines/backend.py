"""outlines-core: compiles regular expressions into tables, and follows texts with them.

    backend = OutlinesBackend(vocabulary)
    matcher = backend.compile(GrammarSource("outlines", "regex", "(?:yes|no)")).matcher()
    matcher.fill(row)          # int32 [W]: which tokens may come next
    matcher.accept(token)

The library's index maps every state and every token to the next state, so a step is a look-up and a state is a number.
It is as large as there are such pairs: outlines_emitter sends only what makes few states. The masks of the first STATES
are made with the index, others when a text comes to them.
Its own Guide is not used: that forgets states beyond a fixed number, and cannot be copied.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version

import numpy as np
import outlines_core

from trunkline.constraint import GrammarSource
from trunkline.grammar.interface import Matcher, MatcherFailed
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.step import Int32

NAME = "outlines"
MAX_ERROR = 200  # characters of the library's message that are repeated
STATES = 256  # whose masks are made at once
PAIR_BYTES = 20  # of one token in one state, in the library's tables


class OutlinesMatcher:
    """One text, see interface.Matcher. `states` are those it has been in, the present one last."""

    __slots__ = ("_grammar", "_states")

    def __init__(self, grammar: "OutlinesGrammar", states: list[int]) -> None:
        self._grammar = grammar
        self._states = states

    def fill(self, row: Int32) -> None:
        """See interface.Matcher. Raises MatcherFailed."""
        row[:] = self._grammar.mask(self._states[-1])
        if not self.is_complete and not row.any():
            raise MatcherFailed("outlines cannot go on: no token may follow.")

    def accept(self, token_id: int) -> bool:
        """See interface.Matcher."""
        state = self._grammar.after(self._states[-1], token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See interface.Matcher. Raises ValueError if fewer were accepted."""
        if not 0 <= num_tokens < len(self._states):
            raise ValueError(f"{num_tokens} tokens cannot be taken back; {len(self._states) - 1} were accepted")
        if num_tokens:
            del self._states[-num_tokens:]

    def count_valid(self, token_ids: list[int]) -> int:
        """See interface.Matcher: an end-of-text id is never counted."""
        state = self._states[-1]
        for count, token_id in enumerate(token_ids):
            following = self._grammar.after(state, token_id)
            if following is None:
                return count
            state = following
        return len(token_ids)

    def forced(self) -> list[int]:
        """See interface.Matcher."""
        tokens: list[int] = []
        state = self._states[-1]
        while (token := self._grammar.only_token(state)) is not None:
            following = self._grammar.after(state, token)
            if following is None:
                break
            tokens.append(token)
            state = following
        return tokens

    @property
    def is_complete(self) -> bool:
        """See interface.Matcher."""
        return self._grammar.may_end(self._states[-1])

    @property
    def is_stopped(self) -> bool:
        """See interface.Matcher."""
        return self.is_complete and not self._grammar.can_go_on(self._states[-1])

    def fork(self) -> "OutlinesMatcher":
        """See interface.Matcher."""
        return OutlinesMatcher(self._grammar, self._states.copy())


class OutlinesGrammar:
    """A compiled source, see interface.CompiledGrammar. States are the index's numbers."""

    backend = NAME

    def __init__(self, backend: "OutlinesBackend", index: outlines_core.Index) -> None:
        self._backend = backend
        self._index = index
        self._masks: dict[int, Int32] = {}
        num_pairs = self._walk()
        self.num_bytes = PAIR_BYTES * num_pairs + sum(mask.nbytes for mask in self._masks.values())

    def matcher(self) -> Matcher:
        """See interface.CompiledGrammar."""
        return OutlinesMatcher(self, [self._index.get_initial_state()])

    def mask(self, state: int) -> Int32:
        """int32 [W], not to be written to."""
        known = self._masks.get(state)
        if known is None:
            known = self._backend.mask_of(self._index.get_allowed_tokens(state) or (), self.may_end(state))
            if len(self._masks) < STATES:
                self._masks[state] = known
        return known

    def after(self, state: int, token_id: int) -> int | None:
        """The next state; None if the token may not come, or is no text."""
        if not self._backend.is_text(token_id):
            return None
        following: int | None = self._index.get_next_state(state, token_id)
        return following

    def may_end(self, state: int) -> bool:
        """Whether a text may end here."""
        return bool(self._index.is_final_state(state))

    def can_go_on(self, state: int) -> bool:
        """Whether any token may follow."""
        return bool((self.mask(state) & self._backend.text).any())

    def only_token(self, state: int) -> int | None:
        """The one token that must follow; None if there is a choice, an end being one."""
        if self.may_end(state):
            return None
        words = np.flatnonzero(mask := self.mask(state))
        if len(words) != 1:
            return None
        word = int(mask[words[0]]) & 0xFFFFFFFF
        return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None

    def _walk(self) -> int:
        """Make the masks of states, nearest first; the number of (state, token) pairs in them."""
        seen = {state := self._index.get_initial_state()}
        waiting, num_pairs = [state], 0
        for state in waiting:  # grows meanwhile
            mask = self.mask(state)
            num_pairs += int(np.unpackbits(mask.view(np.uint8)).sum())
            for byte_token in self._backend.byte_tokens:
                following = self.after(state, byte_token)
                if following is not None and following not in seen and len(seen) < STATES:
                    seen.add(following)
                    waiting.append(following)
        return num_pairs


class OutlinesBackend:
    """Compiles for one vocabulary, see interface.Backend."""

    name = NAME
    version = version("outlines_core")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        ids: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            if token and token_id not in vocabulary.special_ids:
                ids.setdefault(token, []).append(token_id)
        self._texts = frozenset(token_id for same in ids.values() for token_id in same)
        self.byte_tokens = [same[0] for token, same in ids.items() if len(token) == 1]
        self.text = _bits(self._texts, vocabulary.num_words)
        self._ends = _bits(vocabulary.eos_token_ids, vocabulary.num_words)
        # The library wants one end-of-text id, which is in no mask of ours by its doing.
        eos_token_id = vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else vocabulary.num_logits
        self._vocabulary = outlines_core.Vocabulary(eos_token_id, ids)

    def compile(self, source: GrammarSource) -> OutlinesGrammar:
        """See interface.Backend. kind "regex": in the syntax of Rust's regex crate; the whole text matches it."""
        if source.backend != NAME or source.kind != "regex":
            raise ValueError(f"outlines takes sources of kind regex, not {source.backend} {source.kind}")
        try:
            index = outlines_core.Index(source.text, self._vocabulary)
        except ValueError as error:
            raise ValueError(str(error).partition("\n")[0][:MAX_ERROR]) from None
        return OutlinesGrammar(self, index)

    def fill_batch(self, matchers: Sequence[Matcher], rows: Sequence[Int32]) -> dict[int, str]:
        """See interface.Backend. One after the other: each is a copy of a table's row."""
        failed = {}
        for index, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            try:
                matcher.fill(row)
            except MatcherFailed as error:
                failed[index] = str(error)
        return failed

    def is_text(self, token_id: int) -> bool:
        """Whether the id is a token that a text can hold."""
        return token_id in self._texts

    def mask_of(self, token_ids: Sequence[int], may_end: bool) -> Int32:
        """A row for these tokens, int32 [W]."""
        mask = _bits(token_ids, self.vocabulary.num_words)
        mask &= self.text
        if may_end:
            mask |= self._ends
        return mask


def _bits(token_ids: Iterable[int], num_words: int) -> Int32:
    """A mask, int32 [W], of these ids; those beyond it are left out."""
    listed = np.fromiter(token_ids, np.int64)
    bits = np.zeros(num_words * 32, np.uint8)
    bits[listed[listed < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)

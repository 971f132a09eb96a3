"""One request's text under a grammar: a matcher, and what the request itself says about where a text begins and ends.

    text = ConstrainedText(compiled, vocabulary, Rules(...))
    text.num_valid([17, 9, 4])   # 2: of these drafts, how many may come next
    text.take(17)                # True: taken
    text.force(most=64)          # [9, 4]: these must come next, and were taken
    text.is_over                 # True: nothing may follow

What may come next is what the matcher says, and besides:

    before the mark    (Rules.after, "</think>" say) anything but the end of the text; see mark.py
    incomplete         the grammar's tokens; no end-of-text id. A stop id of the request's own that the grammar takes as
                       text may come: the caller wished the text to be cut there
    complete           those, every end-of-text id, and every stop id
    before min_tokens  no end-of-text id and no stop id, unless nothing else is left: then the text is over all the same

`ignore_eos` counts as an endless min_tokens for end-of-text ids.

A text that closes (Grammar.close_on_length) knows an ending at any time, and takes only tokens after which one still fits
(closing.py): `settle` puts the ending's next token in the place of one that would leave no room.

    tokens left    5                        what is written so far can end in 3
    chosen         `,"tags":[`              after it, the shortest ending known has 6 tokens: too many
    taken          `"`                      the first of the ending's 3; from here on, whatever fits may come again

Knows no step, no logits and no pages.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from trunkline.grammar.closing import Ending
from trunkline.grammar.interface import CompiledGrammar, MatcherFailed
from trunkline.grammar.mark import Mark
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.step import Int32

ALL = np.int32(-1)  # every bit of a word


class Rules(NamedTuple):
    """What one request says about its text.

    after       the grammar holds once this was written; None: from the start
    stop_ids    these end a text, too
    min_tokens  nothing ends it before so many
    ignore_eos  end-of-text ids don't end it as long as anything else may follow
    """

    after: Mark | None = None
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


class ConstrainedText:
    """The text so far, and what may follow.

    backend     that compiled its grammar
    matcher     for a whole batch of masks at once (Backend.fill_batch); whoever fills a row so calls `finish` with it
    num_words   32-bit words of a mask
    num_tokens  taken so far
    closed      it was brought to its end because the tokens were used up

    `accept`, `rollback` and `fill` raise MatcherFailed if the matcher gives up, which it does for good.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        vocabulary: Vocabulary,
        rules: Rules,
        *,
        most: int | None = None,
        ending: Sequence[int] = (),
    ) -> None:
        """most  tokens that it may have, if it closes; `ending` then is a whole text, and must fit (`least_tokens`)"""
        self.backend = compiled.backend
        self.matcher = compiled.matcher()
        self.num_words = vocabulary.num_words
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._rules = rules
        self._states = [0]  # of the mark, after each token until it was written
        self._tokens: list[int] = []  # those that the matcher took, after it
        self.closed = False
        self._most = most
        self._ending = None if most is None else Ending(self.matcher, vocabulary, ending)
        self._proposed: int | None = None  # the token that the ending was asked about last

    @property
    def num_tokens(self) -> int:
        return len(self._states) - 1 + len(self._tokens)

    @property
    def is_free(self) -> bool:
        """The grammar does not hold yet."""
        return self._rules.after is not None and self._states[-1] < len(self._rules.after)

    @property
    def is_as_chosen(self) -> bool:
        """Every token that is chosen under its masks is taken: nothing is settled in another's place."""
        return self._ending is None

    @property
    def is_complete(self) -> bool:
        """The text may end here. If the matcher gave up it may not: the next mask says why."""
        if self.is_free:
            return False
        try:
            return self.matcher.is_complete
        except MatcherFailed:
            return False

    @property
    def is_over(self) -> bool:
        """The text must end here: it is complete, and nothing may follow."""
        return not self.is_free and self.matcher.is_stopped and self.is_complete

    def ends_with(self, token_id: int) -> bool:
        """The token is an end-of-text or stop id, and may end the text here. What `accept` takes does not."""
        return self.is_complete and (token_id in self._vocabulary.eos_token_ids or token_id in self._rules.stop_ids)

    # ---------------------------------------------------------------- tokens

    def take(self, token_id: int) -> bool:
        """Go on with a token for good; False, and nothing changes, if the text cannot."""
        was_free = self.is_free
        if not self.accept(token_id):
            return False
        if self._ending is not None and not was_free:
            if token_id == self._proposed:
                self._ending.commit()
            else:
                self._ending.accept(token_id)
        self._proposed = None
        return True

    def accept(self, token_id: int) -> bool:
        """Try a token, to be taken back; False, and nothing changes, if the text cannot go on with it."""
        if token_id in self._vocabulary.eos_token_ids:
            return False
        if self.is_free:
            assert self._rules.after is not None
            state = self._states[-1]
            if token_id in self._rules.after.spilling(state):
                return False
            self._states.append(self._rules.after.follow(state, self._vocabulary.tokens[token_id]))
            return True
        if not self.matcher.accept(token_id):
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        num_matched = min(num_tokens, len(self._tokens))
        if num_matched:
            self.matcher.rollback(num_matched)
            del self._tokens[-num_matched:]
        if num_tokens > num_matched:
            del self._states[num_matched - num_tokens :]

    def restore(self, num_tokens: int) -> None:
        """Be again as after `num_tokens`, with a new matcher: this one gave up on what was only tried."""
        tokens = self._tokens[: max(0, num_tokens - (len(self._states) - 1))]
        del self._states[num_tokens + 1 :]
        self.matcher = self._compiled.matcher()
        if self._ending is not None:
            self._ending.matcher = self.matcher
        self._tokens = [token_id for token_id in tokens if self.matcher.accept(token_id)]
        assert self._tokens == tokens, "a grammar takes what it took"

    def num_valid(self, drafts: list[int]) -> int:
        """How many of these, from the first on, may come next as text. Nothing changes.

        0 if the matcher gave up: the next mask says why.
        """
        if not self.is_free:
            with contextlib.suppress(MatcherFailed):
                return self.matcher.count_valid(_before(self._vocabulary.eos_token_ids, drafts))
            return 0
        num = 0
        while num < len(drafts) and self.accept(drafts[num]):
            num += 1
        self.rollback(num)
        return num

    def force(self, most: int) -> list[int]:
        """Take the tokens that must come next, at most `most`, and none that would end the text as a stop id.

        If the matcher gives up, those before that; the next mask says why.
        """
        taken: list[int] = []
        if most <= 0 or self.is_over:
            return taken
        with contextlib.suppress(MatcherFailed):
            if self._must_close:
                token_ids = self._rest()
                self.closed = True
            else:
                token_ids = [] if self.is_free else self.matcher.forced()
            for token_id in _before(self._rules.stop_ids, token_ids)[:most]:
                if not self.take(token_id):
                    break
                taken.append(token_id)
        return taken

    # ---------------------------------------------------------------- closing

    @staticmethod
    def least_tokens(after: Mark | None, ending: Sequence[int]) -> int:
        """Tokens of a text that is closed as soon as it begins: the mark, if there is one, and the ending."""
        return len(ending) + (len(after.spelling(0)) if after is not None else 0)

    @property
    def fallback(self) -> int:
        """The token that `settle` would put in the place of another; -1: none."""
        rest = self._rest() if self._ending is not None else []
        return rest[0] if rest else -1

    def settle(self, token_id: int) -> int | None:
        """The token to take where `token_id` was chosen: that, or the next of the ending if there is room for nothing else, or no
        ending would fit after it.

        None: the text is complete, and has to end without a token more.
        """
        self._proposed = None
        if self._ending is None or self.ends_with(token_id):
            return token_id
        assert self._most is not None
        # Where `force` would take the ending it is taken here, too: what is written must not depend on which of them comes first.
        if not self._must_close:
            length = self._length_after(token_id)
            if length is not None and self.num_tokens + 1 + length <= self._most:
                return token_id
        self.closed = True
        self._proposed = None
        rest = self._rest()
        return rest[0] if rest else None

    def _length_after(self, token_id: int) -> int | None:
        """Tokens of the ending after this one; None: none is known."""
        assert self._ending is not None
        if self.is_free:
            assert self._rules.after is not None
            state = self._rules.after.follow(self._states[-1], self._vocabulary.tokens[token_id])
            return len(self._rules.after.spelling(state)) + len(self._ending.tokens or ())
        self._proposed = token_id
        return self._ending.propose(token_id)

    def _rest(self) -> list[int]:
        """The ending from here on, with what is missing of the mark."""
        assert self._ending is not None
        missing = self._rules.after.spelling(self._states[-1]) if self.is_free and self._rules.after is not None else ()
        return [*missing, *(self._ending.tokens or ())]

    @property
    def _must_close(self) -> bool:
        """So many tokens are left as the ending has."""
        return self._most is not None and self.num_tokens + len(self._rest()) >= self._most

    # ---------------------------------------------------------------- masks

    def fill(self, row: Int32) -> None:
        """Write what may come next to `row`, int32 [W]. Bits beyond the vocabulary mean nothing."""
        if not self.is_free:
            self.matcher.fill(row)
        self.finish(row)

    def finish(self, row: Int32) -> None:
        """The rest of `fill`, if the matcher has filled the row already, or need not since the text `is_free`."""
        eos, stops = self._vocabulary.eos_token_ids, self._rules.stop_ids
        if self.is_free:
            assert self._rules.after is not None
            row[:] = ALL
            _clear(row, eos)
            _clear(row, self._rules.after.spilling(self._states[-1]))
            if self.num_tokens < self._rules.min_tokens:
                _clear(row, stops)
            return
        if self.is_complete:
            _set(row, stops)
        unwanted: set[int] = set()
        if self._rules.ignore_eos:
            unwanted.update(set(eos).difference(stops))
        if self.num_tokens < self._rules.min_tokens:
            unwanted.update(eos, stops)
        if unwanted:
            before = row.copy()
            _clear(row, unwanted)
            if not row.any():
                row[:] = before


def _before(ends: Iterable[int], token_ids: list[int]) -> list[int]:
    """The ids before the first that is one of `ends`."""
    for index, token_id in enumerate(token_ids):
        if token_id in ends:
            return token_ids[:index]
    return token_ids


def _bit(token_id: int) -> np.uint32:
    return np.uint32(1 << token_id % 32)


def _set(row: Int32, token_ids: Iterable[int]) -> None:
    words = row.view(np.uint32)
    for token_id in token_ids:
        if token_id < 32 * len(row):
            words[token_id // 32] |= _bit(token_id)


def _clear(row: Int32, token_ids: Iterable[int]) -> None:
    words = row.view(np.uint32)
    for token_id in token_ids:
        if token_id < 32 * len(row):
            words[token_id // 32] &= ~_bit(token_id)

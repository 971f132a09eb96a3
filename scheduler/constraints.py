"""Requests whose text must follow a grammar: from the compilation to the tokens that it forces.

    generate    the grammar is submitted to the compile service, and the prompt is read all but its last token meanwhile
    poll        compiled: the request has its text (grammar/text.py), and what must come first is known at once
    plan        its rows name a mask (masks.py), filled while the worker computes
    apply       each token chosen is taken by the text, and so are those that must follow it

Forced tokens: where a grammar leaves one token, that is appended without being computed first; the next step computes all
that are new together, like a chunk of a prompt, and chooses what follows them. The text is the same as without: a mask of
one token decides alone, and noise belongs to a position, so leaving some out shifts nothing.

With a step in flight (Worker.depth 1) the next one is planned before its token is known. The mask of that row is filled
late: once the token has been taken, while the step computes. Tokens that are forced then are not appended, for the first of
them is being chosen already, by a mask that leaves nothing else; but if there are more, the request pauses for a step, and
has them then. A text that is brought to its end in time (close_on_length) may settle for another token than the one that was
chosen: it is never planned ahead.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from trunkline.config import GrammarConfig
from trunkline.constraint import Grammar
from trunkline.errors import GenerationFailed, InvalidParameter, RequestError
from trunkline.grammar.interface import Backend, Compiler, MatcherFailed
from trunkline.grammar.mark import Mark
from trunkline.grammar.text import ConstrainedText, Rules
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.messages import Totals
from trunkline.scheduler.counters import Counters
from trunkline.scheduler.masks import StepMasks
from trunkline.scheduler.request import MOST_FORCED, Request, State

# Seconds that the mask of one token is counted by: microseconds are usual, and a millisecond would be felt in every step.
MASK_SECONDS = (0.000005, 0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1)
MOST_MARKS = 64  # marks (Grammar.after) that are kept: each remembers which tokens end in it


class Settled(NamedTuple):
    """A request that waits no more: it has its text, or `error` says why it can't."""

    request: Request
    error: RequestError | None


class Constraints:
    """The constrained requests of one engine.

    grammars  None: none can be compiled, and who wants one is refused
    """

    def __init__(self, grammars: Compiler | None, config: GrammarConfig, counters: Counters) -> None:
        self.grammars = grammars
        self.config = config
        self.counters = counters
        self._pending: dict[Request, None] = {}  # in order of arrival
        self._num_following = 0  # requests that have their text, and have not ended
        self._marks: dict[str, Mark] = {}
        self._mask_seconds: defaultdict[str, Totals] = defaultdict(lambda: Totals.within(*MASK_SECONDS))

    # ---------------------------------------------------------------- requests come and go

    def check(self, request: Request) -> None:
        """Raises InvalidParameter if the request wants a grammar and there is nothing to compile it."""
        if request.grammar is not None and self.grammars is None:
            raise InvalidParameter(
                f"'{request.grammar.where}' cannot be followed: this engine has no tokenizer to compile grammars for.",
                param=request.grammar.where,
            )

    def enter(self, request: Request, leader: Request | None) -> None:
        """Begin to compile its grammar, if it has one. Who follows a leader (fork.py) waits for the same compilation, so
        that they have it together."""
        if request.grammar is not None and self.grammars is not None:
            compilation = leader.compilation if leader is not None else None
            request.compilation = compilation or self.grammars.submit(request.grammar)
            request.compiles = not request.compilation.done
            self._pending[request] = None

    def leave(self, request: Request) -> None:
        """The request has ended, in whatever state."""
        self._pending.pop(request, None)
        self._num_following -= request.text is not None

    @property
    def any_pending(self) -> bool:
        """Somebody waits for a grammar."""
        return bool(self._pending)

    def wait(self, seconds: float) -> None:
        """Block until a grammar is compiled, at most so long."""
        if self.grammars is not None:
            self.grammars.wait(seconds)

    def poll(self) -> Iterator[Settled]:
        """Those whose grammars are compiled by now, or were refused. A group's are settled together."""
        done = {
            request.compilation: None
            for request in self._pending
            if request.compilation is not None and request.compilation.done
        }
        for request in [request for request in self._pending if request.compilation in done]:
            del self._pending[request]
            try:
                request.text = self._text(request)
            except RequestError as error:
                yield Settled(request, error)
            except MatcherFailed as error:
                yield Settled(request, GenerationFailed(f"The grammar cannot be followed: {error}"))
            else:
                self._num_following += 1
                yield Settled(request, None)

    def _text(self, request: Request) -> ConstrainedText:
        assert request.grammar is not None and request.compilation is not None and self.grammars is not None
        compiled, vocabulary, sampling = request.compilation.result(), self.grammars.vocabulary, request.sampling
        rules = Rules(
            after=self._mark(request.grammar.after, vocabulary),
            stop_ids=tuple(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
        )
        if not request.grammar.close_on_length:
            return ConstrainedText(compiled, vocabulary, rules)
        ending, most = request.compilation.ending, request.limit - request.num_prompt
        _check_ending(request.grammar, rules.after, ending, most)
        return ConstrainedText(compiled, vocabulary, rules, most=most, ending=ending or ())

    def _mark(self, after: str, vocabulary: Vocabulary) -> Mark | None:
        if not after:
            return None
        if after not in self._marks:
            if len(self._marks) >= MOST_MARKS:
                del self._marks[next(iter(self._marks))]
            self._marks[after] = Mark(after.encode(), vocabulary.tokens)
        return self._marks[after]

    # ---------------------------------------------------------------- forced tokens

    def first(self, request: Request) -> list[int]:
        """The tokens that a text must begin with, taken by it; to be appended before the prompt's last token is computed.

        None where others follow the request (fork.py): their first tokens are chosen from the prompt's last one. And
        never all there is: the last token is chosen, so that a text ends as every other does.
        """
        text = request.text
        if text is None or request.followers or request.state is State.FOLLOWING:
            return []
        forced = self._force(request, text, request.limit - request.num_tokens - 1)
        if forced and text.is_over:
            text.rollback(1)
            forced.pop()
        self._count(len(forced))
        return forced

    def next(self, request: Request) -> list[int]:
        """The tokens that must follow those the request has by now, taken by its text; to be appended."""
        if request.text is None:
            return []
        forced = self._force(request, request.text, request.limit - request.num_tokens)
        if request.num_in_flight:
            _take_back(request.text, len(forced))
            request.pauses = len(forced) > 1
            return []
        request.pauses = False
        self._count(len(forced))
        return forced

    def _force(self, request: Request, text: ConstrainedText, most: int) -> list[int]:
        """Nobody has computed logprobs of tokens that were not chosen."""
        if not self.config.forced_tokens or request.sampling.logprobs is not None:
            return []
        return text.force(min(most, MOST_FORCED))

    def _count(self, num_tokens: int) -> None:
        self.counters.draft_tokens["grammar"] += num_tokens
        self.counters.accepted_tokens["grammar"] += num_tokens

    # ---------------------------------------------------------------- masks

    def fill(self, steps: list[StepMasks], *, late: bool = False) -> None:
        """Fill masks while the worker computes their step; `late` ones once the step before has been applied."""
        for masks in steps:
            (masks.fill_late if late else masks.fill)(self._backend, self._observe)

    def _backend(self, name: str) -> Backend:
        assert self.grammars is not None, "who follows a grammar was compiled one"
        return self.grammars.backend(name)

    def _observe(self, backend: str, num_rows: int, seconds: float) -> None:
        self._mask_seconds[backend].add(seconds, count=num_rows)

    def stats(self) -> dict[str, Any]:
        """Counters since start and gauges of now, with those of the service."""
        return {
            "grammar_running": self._num_following,
            "grammar_waiting": len(self._pending),
            "grammar_mask_seconds": msgspec.to_builtins(self._mask_seconds),
            **(self.grammars.stats() if self.grammars is not None else {}),
        }


def _take_back(text: ConstrainedText, num_tokens: int) -> None:
    """Also if the matcher gave up on them. One that gives up again fails its request, by the next mask."""
    try:
        text.rollback(num_tokens)
    except MatcherFailed:
        with contextlib.suppress(MatcherFailed):
            text.restore(text.num_tokens - num_tokens)


def _check_ending(grammar: Grammar, after: Mark | None, ending: Sequence[int] | None, most: int) -> None:
    """Raises InvalidParameter if no text of at most `most` tokens could be promised."""
    if ending is None:
        raise InvalidParameter(
            f"'close_on_length' is true, but no ending was found for the grammar of '{grammar.where}', so it cannot be kept."
            " Leave it out, or simplify the grammar.",
            param="close_on_length",
        )
    try:
        least = ConstrainedText.least_tokens(after, ending)
    except ValueError as error:
        raise InvalidParameter(f"'close_on_length' cannot be kept: {error}.", param="close_on_length") from None
    if least > most:
        raise InvalidParameter(
            f"max_tokens is {most}; the shortest text that follows the schema has {least} tokens. Allow at least so many.",
            param="max_tokens",
        )

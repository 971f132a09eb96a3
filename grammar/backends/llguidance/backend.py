"""llguidance: compiles a source into an automaton and an Earley parser, and follows texts with them.

    backend = LlguidanceBackend(vocabulary)
    matcher = backend.compile(source).matcher()
    matcher.fill(row)          # int32 [W]: which tokens may come next
    matcher.accept(token)

Sources are written by llguidance_emitter, which knows schemas; nothing here does. Importing this imports llguidance.

The library never raises for a grammar: a matcher that fails is in an error state for good, its masks then say
"end of text". So `is_error` is asked after each step. Its time is bounded by LIMITS, counted in its own units of work and not
in seconds. It lets other threads run while it works.
All matchers of a grammar share an automaton, which grows as texts are followed: quick, but where one text drives it over a
limit, all of them fail. So a matcher that fails tries once more with an automaton of its own, from the tokens it has accepted:
what fails there is the text's own affair.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from trunkline.constraint import GrammarSource
from trunkline.grammar.backends.llguidance.lark import EMPTY, complete, wrap
from trunkline.grammar.interface import Matcher, MatcherFailed
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.step import Int32

NAME = "llguidance"
KINDS = ("grammar", "ebnf")
T = TypeVar("T")

MAX_ERROR = 200  # characters of the library's message that are repeated
ALONE_SECONDS = 0.001  # of masks, before other threads are woken for the rest: a usual one takes less than waking them

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=10_000,  # places in the grammar at which one text may be at once
    initial_lexer_fuel=4_000_000,  # regular expressions, once: about 80 ms
    step_lexer_fuel=500_000,  # and for one mask: about 40 ms. A password with four lookaheads needs 300,000 for its first
    step_max_items=50_000,  # of the parser, for one mask: up to 100 ms
    max_lexer_states=100_000,  # of the automaton; 1-2 kB each
    max_grammar_size=1_000_000,  # symbols
    precompute_large_lexemes=True,
    verbose_errors=False,  # else errors repeat the grammar and the text
)


class LlguidanceMatcher:
    """One text, see interface.Matcher."""

    __slots__ = ("_forced", "_grammar", "_inner", "_is_alone", "_tokens")

    def __init__(self, grammar: "LlguidanceGrammar", inner: llguidance.LLMatcher, tokens: list[int]) -> None:
        self._grammar = grammar
        self._inner = inner
        self._tokens = tokens  # accepted so far
        self._is_alone = False  # nothing else uses its automaton
        self._forced: list[int] | None = None  # what the library says must come next; None: it was not asked here

    def fill(self, row: Int32) -> None:
        """See interface.Matcher. `row` must be contiguous."""
        self._attempt(lambda inner: self._grammar.engine.compute_masks([inner], [row]))

    def accept(self, token_id: int) -> bool:
        """See interface.Matcher. Raises MatcherFailed."""
        if not self._grammar.engine.is_text(token_id):
            return False
        # Where a token is forced, the library would take other spellings of the same text, too; its masks don't have those.
        if self._ask_forced()[:1] not in ([], [token_id]):
            return False
        if self._attempt(lambda inner: inner.try_consume_tokens([token_id])) != 1:
            return False
        self._tokens.append(token_id)
        self._forced = None
        return True

    def rollback(self, num_tokens: int) -> None:
        """See interface.Matcher. Raises ValueError if fewer were accepted, and MatcherFailed."""
        if not 0 <= num_tokens <= len(self._tokens):  # the library would fail for good
            raise ValueError(f"{num_tokens} tokens cannot be taken back; {len(self._tokens)} were accepted")
        if num_tokens:
            self._attempt(lambda inner: inner.rollback(num_tokens))
            del self._tokens[-num_tokens:]
            self._forced = None

    def count_valid(self, token_ids: list[int]) -> int:
        """See interface.Matcher: an end-of-text id is never counted. Raises MatcherFailed."""
        count = 0
        while count < len(token_ids) and self.accept(token_ids[count]):
            count += 1
        self.rollback(count)
        return count

    def forced(self) -> list[int]:
        """See interface.Matcher. Raises MatcherFailed."""
        if self._inner.is_stopped():
            return []
        return self._grammar.engine.text_prefix(self._ask_forced())

    @property
    def is_complete(self) -> bool:
        """See interface.Matcher. Raises MatcherFailed."""
        return bool(self._attempt(lambda inner: inner.is_accepting()))

    @property
    def is_stopped(self) -> bool:
        """See interface.Matcher. True, too, for a text that has failed."""
        return bool(self._inner.is_stopped())

    def fork(self) -> "LlguidanceMatcher":
        """See interface.Matcher."""
        self._is_alone = False
        other = LlguidanceMatcher(self._grammar, self._inner.deep_copy(), self._tokens.copy())
        other._forced = self._forced
        return other

    def filled(self, row: Int32, num_words: int) -> None:
        """The rest of `fill`, where the library was asked already, together with others, and may have failed.

        num_words  of the row that are not 0. Where a token is forced, the mask has no other
        """
        if self._inner.is_error():
            self.fill(row)
        elif num_words > 1:
            self._forced = []

    def _ask_forced(self) -> list[int]:
        """What the library says must come next; end-of-text ids may be among it."""
        if self._forced is None:
            self._forced = self._attempt(lambda inner: inner.compute_ff_tokens())
        return self._forced

    def _attempt(self, operation: Callable[[llguidance.LLMatcher], T]) -> T:
        """What the operation gives; it is tried again with an automaton of its own. Raises MatcherFailed."""
        result = operation(self._inner)
        if self._inner.is_error() and not self._is_alone:
            self._inner = self._grammar.another()
            self._is_alone = True
            self._inner.consume_tokens(self._tokens)
            result = operation(self._inner)
        if self._inner.is_error():
            raise MatcherFailed(_reason(self._inner.get_error()))
        return result


class LlguidanceGrammar:
    """A compiled source, see interface.CompiledGrammar.

    num_bytes is an estimate, since the library does not tell: a matcher and the tables that all matchers of a grammar share
    hold some ten times the source, and the automaton, which grows as texts are followed, up to half a megabyte for usual
    schemas.
    """

    backend = NAME

    def __init__(self, backend: "LlguidanceBackend", pristine: llguidance.LLMatcher, text: str) -> None:
        self.engine = backend
        self._pristine = pristine  # never advanced
        self._text = text
        self.num_bytes = 512 * 1024 + 10 * len(text)

    def matcher(self) -> Matcher:
        """See interface.CompiledGrammar. A copy of one that was made when the grammar was compiled."""
        return LlguidanceMatcher(self, self._pristine.deep_copy(), [])

    def another(self) -> llguidance.LLMatcher:
        """A matcher with an automaton of its own. New texts get a new one, too, since the old one has reached a limit."""
        self._pristine = self.engine.make_matcher(self._text)
        return self.engine.make_matcher(self._text)


class LlguidanceBackend:
    """Compiles for one vocabulary, see interface.Backend."""

    name = NAME
    version = llguidance.get_version().split()[0].partition("@")[2] or "unknown"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = _make_tokenizer(vocabulary)
        self._tokenizer_words = (self._tokenizer.vocab_size + 31) // 32
        self._executor = llguidance.LLExecutor()

    def compile(self, source: GrammarSource) -> LlguidanceGrammar:
        """See interface.Backend.

        kind "grammar"  the library's own JSON; "ebnf": a grammar in GBNF
        """
        if source.backend != NAME or source.kind not in KINDS:
            raise ValueError(
                f"llguidance takes sources of kind {' or '.join(KINDS)}, not {source.backend} {source.kind}"
            )
        text = _lark_from_gbnf(source.text) if source.kind == "ebnf" else complete(source.text, self._special)
        pristine = self.make_matcher(text)
        if pristine.is_error():
            raise ValueError(_first_line(pristine.get_error()))
        self._check_start(pristine)
        return LlguidanceGrammar(self, pristine, text)

    def make_matcher(self, text: str) -> llguidance.LLMatcher:
        """The library's own matcher for a source's text; it may be in the error state."""
        return llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)

    def fill_batch(self, matchers: Sequence[Matcher], rows: Sequence[Int32]) -> dict[int, str]:
        """See interface.Backend. Each matcher must be one of this backend's, and no two the same."""
        ours = [matcher for matcher in matchers if isinstance(matcher, LlguidanceMatcher)]
        if len(ours) != len(matchers):
            raise TypeError("llguidance fills masks for its own matchers only")
        self.compute_masks([matcher._inner for matcher in ours], rows)
        failed = {}
        for index, (matcher, row) in enumerate(zip(ours, rows, strict=True)):
            try:
                matcher.filled(row, int(np.count_nonzero(row)))
            except MatcherFailed as error:
                failed[index] = str(error)
        return failed

    def compute_masks(self, matchers: Sequence[llguidance.LLMatcher], rows: Sequence[Int32]) -> None:
        """Write each matcher's mask to its row. What a failed one writes means nothing."""
        masks = np.zeros((len(rows), self._tokenizer_words), np.int32)
        address, num_bytes, num_done = masks.ctypes.data, masks.strides[0], 0
        stop_at = time.perf_counter() + ALONE_SECONDS
        while num_done < len(rows) and (num_done == len(rows) - 1 or time.perf_counter() < stop_at):
            matchers[num_done].unsafe_compute_mask_ptr(address + num_done * num_bytes, num_bytes)
            num_done += 1
        if num_done < len(rows):
            numbered = [(matcher, index) for index, matcher in enumerate(matchers[num_done:], start=num_done)]
            self._executor.unsafe_compute_mask_ptr(numbered, address, num_bytes, len(rows))
        for row, mask in zip(rows, masks, strict=True):
            row[:] = mask[: len(row)]  # the end-of-text id that we made up, if any, may have a word of its own
            if self._tokenizer.vocab_size > self.vocabulary.num_logits:
                _clear(row, self.vocabulary.num_logits)

    def is_text(self, token_id: int) -> bool:
        """Whether the library may be asked about this id: others are no text, or put a matcher in its error state."""
        return 0 <= token_id < self.vocabulary.num_logits and token_id not in self.vocabulary.eos_token_ids

    def text_prefix(self, token_ids: list[int]) -> list[int]:
        """The ids before the first that is not `is_text`."""
        for index, token in enumerate(token_ids):
            if not self.is_text(token):
                return token_ids[:index]
        return token_ids

    def _special(self, text: str) -> str:
        """A special token, as it stands in a rule. One that ends a text is no text: nothing. Raises ValueError."""
        token = self.vocabulary.special_id(text)
        if token is None:
            raise ValueError(f"the model's vocabulary has no special token {text[:MAX_ERROR]!r}")
        return EMPTY if token in self.vocabulary.eos_token_ids else f"<[{token}]>"

    def _check_start(self, pristine: llguidance.LLMatcher) -> None:
        """Raises ValueError if no text can even begin, or its beginning is forced without end. Its mask is kept for all
        copies."""
        row = np.zeros(self.vocabulary.num_words, np.int32)
        self.compute_masks([pristine], [row])
        if pristine.is_error():
            raise ValueError(f"No text can begin. {_reason(pristine.get_error())}")
        asked = pristine.deep_copy()
        asked.try_consume_tokens(asked.compute_ff_tokens()[:1])
        if asked.is_error():
            raise ValueError(f"The text that is forced at the beginning has no end. {_reason(asked.get_error())}")


class _TokenizerView:
    """Our vocabulary in the shape that LLTokenizer reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes], eos_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(vocabulary.special_ids | set(eos_token_ids))
        self.eos_token_id = eos_token_ids[0]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, bytes) else text.encode())


def _lark_from_gbnf(text: str) -> str:
    """A source's text for a grammar in GBNF. Raises ValueError."""
    try:
        return wrap(gbnf_to_lark(text))
    except Exception as error:  # its parser raises plain Exception, and KeyError for a rule that is not there
        raise ValueError(f"no grammar in GBNF: {_first_line(str(error))}") from error


def _make_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """The library wants an end-of-text id: where the model has none, one more is made up, and never shown in a mask."""
    tokens = list(vocabulary.tokens)
    eos_token_ids = list(vocabulary.eos_token_ids)
    if not eos_token_ids:
        eos_token_ids = [len(tokens)]
        tokens.append(b"")
    view = _TokenizerView(vocabulary, tokens, eos_token_ids)
    return llguidance.LLTokenizer(view, n_vocab=len(tokens), eos_token=eos_token_ids)


def _clear(row: Int32, token_id: int) -> None:
    word, bit = divmod(token_id, 32)
    if word < len(row):
        row.view(np.uint32)[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)


def _reason(message: str) -> str:
    """Why a text cannot go on, as a sentence."""
    line = _first_line(message)
    if "NoExtension" in line:
        return "Nothing can follow: the grammar leads to a dead end here."
    return f"llguidance has reached a limit: {line}."


def _first_line(message: str) -> str:
    """What the library says, without the grammar that may follow it."""
    line = message.strip().partition("\n")[0].strip().rstrip(".")
    return line if len(line) <= MAX_ERROR else line[: MAX_ERROR - 1] + "…"

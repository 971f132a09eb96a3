"""XGrammar: compiles context-free grammars and structural tags, and follows texts with them.

    backend = XgrammarBackend(vocabulary)
    matcher = backend.compile(source).matcher()
    matcher.fill(row)          # int32 [W]: which tokens may come next
    matcher.accept(token)

Sources are written by xgrammar_emitter and structural_tag, which know schemas; nothing here does. Importing this
imports xgrammar, and with it transformers: seconds.

The library compiles a rule's masks when a text first comes to them (enable_dynamic_compilation): compiling takes
milliseconds, and the first text pays for the masks that it meets. Ids that are special, or stand for nothing, are given
to it as empty tokens, which its masks never hold: by their names, <|im_end|> would be legal inside a string.
"""

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version

import numpy as np
import xgrammar

from trunkline.constraint import GrammarSource
from trunkline.grammar.interface import Matcher, MatcherFailed
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.step import Int32

NAME = "xgrammar"
KINDS = ("ebnf", "structural_tag")
MAX_ERROR = 200  # characters of the library's message that are repeated: it likes to repeat the whole source
CACHE_BYTES = 64 * 2**20  # of masks that rules of different grammars share
NUM_THREADS = 2


class XgrammarMatcher:
    """One text, see interface.Matcher."""

    __slots__ = ("_backend", "_count", "_inner")

    def __init__(self, backend: "XgrammarBackend", inner: xgrammar.GrammarMatcher, count: int) -> None:
        self._backend = backend
        self._inner = inner
        self._count = count  # tokens accepted

    def fill(self, row: Int32) -> None:
        """See interface.Matcher. Raises MatcherFailed."""
        self._backend.fill_one(self._inner, row)

    def accept(self, token_id: int) -> bool:
        """See interface.Matcher."""
        accepted = self._backend.is_text(token_id) and bool(self._inner.accept_token(token_id))
        self._count += accepted
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """See interface.Matcher. Raises ValueError if fewer were accepted."""
        if not 0 <= num_tokens <= self._count:
            raise ValueError(f"{num_tokens} tokens cannot be taken back; {self._count} were accepted")
        if num_tokens:
            self._inner.rollback(num_tokens)
            self._count -= num_tokens

    def count_valid(self, token_ids: list[int]) -> int:
        """See interface.Matcher: an end-of-text id is never counted."""
        valid = 0
        for token_id in token_ids:
            if not self.accept(token_id):
                break
            valid += 1
        self.rollback(valid)
        return valid

    def forced(self) -> list[int]:
        """Always []: each would take a mask. (The library's own jump is by text, whose tokens may be others.)"""
        return []

    @property
    def is_complete(self) -> bool:
        """See interface.Matcher."""
        return bool(self._inner.is_completed())

    @property
    def is_stopped(self) -> bool:
        """See interface.Matcher. Takes a mask where the text may end."""
        return self.is_complete and not self._backend.can_go_on(self._inner)

    def fork(self) -> "XgrammarMatcher":
        """See interface.Matcher."""
        return XgrammarMatcher(self._backend, self._inner.fork(), self._count)


class XgrammarGrammar:
    """A compiled source, see interface.CompiledGrammar. num_bytes grows as texts are followed."""

    backend = NAME

    def __init__(self, backend: "XgrammarBackend", compiled: xgrammar.CompiledGrammar) -> None:
        self._backend = backend
        self._compiled = compiled

    @property
    def num_bytes(self) -> int:
        """See interface.CompiledGrammar: what the library says."""
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        """See interface.CompiledGrammar."""
        return XgrammarMatcher(self._backend, xgrammar.GrammarMatcher(self._compiled), 0)


class XgrammarBackend:
    """Compiles for one vocabulary, see interface.Backend."""

    name = NAME
    version = version("xgrammar")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        tokens = [
            b"" if token_id in vocabulary.special_ids else token for token_id, token in enumerate(vocabulary.tokens)
        ]
        self._text = _bits((bool(token) for token in tokens), vocabulary.num_words)
        eos_token_ids = set(vocabulary.eos_token_ids)
        self._ends = _bits((token_id in eos_token_ids for token_id in range(len(tokens))), vocabulary.num_words)
        self._is_text = [bool(token) for token in tokens]
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                tokens,
                xgrammar.VocabType.RAW,
                vocab_size=vocabulary.num_logits,
                stop_token_ids=list(vocabulary.eos_token_ids),
            ),
            max_threads=NUM_THREADS,
            cache_limit_bytes=CACHE_BYTES,
            enable_dynamic_compilation=True,
        )
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=NUM_THREADS)

    def compile(self, source: GrammarSource) -> XgrammarGrammar:
        """See interface.Backend.

        kind "ebnf"  a grammar in XGrammar's GBNF; "structural_tag": its JSON
        """
        if source.backend != NAME or source.kind not in KINDS:
            raise ValueError(f"xgrammar takes sources of kind {' or '.join(KINDS)}, not {source.backend} {source.kind}")
        try:
            if source.kind == "ebnf":
                compiled = self._compiler.compile_grammar(source.text)
            else:
                compiled = self._compiler.compile_structural_tag(source.text)
        except (RuntimeError, ValueError) as error:
            raise ValueError(_brief(str(error))) from None
        return XgrammarGrammar(self, compiled)

    def fill_batch(self, matchers: Sequence[Matcher], rows: Sequence[Int32]) -> dict[int, str]:
        """See interface.Backend. Each matcher must be one of this backend's."""
        ours = [matcher for matcher in matchers if isinstance(matcher, XgrammarMatcher)]
        if len(ours) != len(matchers):
            raise TypeError("xgrammar fills masks for its own matchers only")
        if len(ours) > 1:
            masks = np.tile(self._text, (len(ours), 1))
            try:
                self._batch.batch_fill_next_token_bitmask([matcher._inner for matcher in ours], masks)
            except RuntimeError:
                pass  # one of them failed: the loop below finds out which
            else:
                return self._take(ours, masks, rows)
        failed = {}
        for index, (matcher, row) in enumerate(zip(ours, rows, strict=True)):
            try:
                matcher.fill(row)
            except MatcherFailed as error:
                failed[index] = str(error)
        return failed

    def fill_one(self, inner: xgrammar.GrammarMatcher, row: Int32) -> None:
        """Write a mask to `row`, int32 [W]. Raises MatcherFailed."""
        mask = self._text[np.newaxis].copy()
        try:
            inner.fill_next_token_bitmask(mask)
        except RuntimeError as error:
            raise MatcherFailed(f"xgrammar cannot go on: {_brief(str(error))}.") from None
        self._write(inner, mask[0], row)

    def can_go_on(self, inner: xgrammar.GrammarMatcher) -> bool:
        """Whether any token but an end of text may come next."""
        row = np.empty_like(self._text)
        self.fill_one(inner, row)
        return bool((row & self._text).any())

    def is_text(self, token_id: int) -> bool:
        """Whether the id is a token that a text can hold."""
        return 0 <= token_id < len(self._is_text) and self._is_text[token_id]

    def _take(self, matchers: list[XgrammarMatcher], masks: Int32, rows: Sequence[Int32]) -> dict[int, str]:
        failed = {}
        for index, (matcher, mask, row) in enumerate(zip(matchers, masks, rows, strict=True)):
            try:
                self._write(matcher._inner, mask, row)
            except MatcherFailed as error:
                failed[index] = str(error)
        return failed

    def _write(self, inner: xgrammar.GrammarMatcher, mask: Int32, row: Int32) -> None:
        """The library leaves a mask alone where everything is allowed, so it was full of text before; only the ends are
        left to say. Raises MatcherFailed if it is empty."""
        np.bitwise_and(mask, self._text, out=row)
        if inner.is_completed():
            row |= self._ends
        elif not row.any():
            raise MatcherFailed("xgrammar cannot go on: no token may follow.")


def _bits(flags: Iterable[bool], num_words: int) -> Int32:
    """A mask, int32 [W], of the ids whose flag is set."""
    bits = np.zeros(num_words * 32, np.uint8)
    listed = np.fromiter(flags, np.uint8)
    bits[: len(listed)] = listed
    return np.packbits(bits, bitorder="little").view(np.int32)


def _brief(message: str) -> str:
    """The first line, without the place in the library's source that it came from."""
    line = message.strip().partition("\n")[0]
    line = re.sub(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", line)
    line = line.partition("The JSON string is:")[0].rstrip(" .")
    return line if len(line) <= MAX_ERROR else line[: MAX_ERROR - 3] + "..."

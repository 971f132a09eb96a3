"""What the parts of the grammar module give each other, and the engine. Names and shapes only; nothing is computed here.

    Constraint ──► prepare (API process, pure Python) ──► Grammar ──► CompileService (engine) ──► CompiledGrammar ──► Matcher
                   meta-check, normalize, forms, emit     sources      threads, caches             one per text

Nothing here imports a backend: that takes seconds for some.
"""

from typing import Any, NamedTuple, Protocol

from trunkline.constraint import Grammar, GrammarSource
from trunkline.errors import RequestError
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.step import Int32


class Finding(NamedTuple):
    """Something in a schema that cannot be enforced, or is wrong.

    pointer  JSON pointer (RFC 6901) into the schema as it was sent; "" is the root
    keyword  e.g. "uniqueItems"
    reason   why, as a sentence that begins and ends within another one; "it" is what the keyword says
    """

    pointer: str
    keyword: str
    reason: str


class Unsupported(Exception):
    """A keyword cannot be enforced (by this backend, or by any)."""

    def __init__(self, pointer: str, keyword: str, reason: str) -> None:
        super().__init__(f"{pointer or '/'}: {keyword}: {reason}")
        self.finding = Finding(pointer, keyword, reason)


class InvalidSchema(Exception):
    """No backend could take it: not a schema, too large, a reference that leads nowhere, nothing satisfies it."""

    def __init__(self, pointer: str, keyword: str, reason: str) -> None:
        super().__init__(f"{pointer or '/'}: {keyword}: {reason}")
        self.finding = Finding(pointer, keyword, reason)


class GrammarRefused(RequestError):
    """A constraint cannot be followed: the schema is wrong, or holds what cannot be enforced. Message and `param` say where."""

    code: str | None = "unsupported_grammar"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, findings: tuple[Finding, ...] = ()
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.findings = findings


class MatcherFailed(Exception):
    """A matcher cannot go on: a limit was reached, or nothing can follow. Fails its own request only."""


class Matcher(Protocol):
    """Follows one text through a compiled grammar, token by token. Not thread-safe.

    W words of 32 bits: ceil(vocabulary of the model / 32); token i is bit i % 32 of word i // 32.
    """

    def fill(self, row: Int32) -> None:
        """Write the tokens that may come next to `row`, int32 [W], every word of it.

        End-of-text ids are set exactly where the text may end here. Special tokens are not, unless the grammar names
        them; nor are ids beyond the vocabulary. Raises MatcherFailed.
        """

    def accept(self, token_id: int) -> bool:
        """Go on with a token; False, and nothing changes, if it may not come here. Not for end-of-text ids."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""

    def count_valid(self, token_ids: list[int]) -> int:
        """How many of these, from the first on, may come next. Nothing changes."""

    def forced(self) -> list[int]:
        """Tokens that must come next, each the only one that `fill` would allow; [] if there is a choice, or if finding
        out would take a mask for each. Nothing changes."""

    @property
    def is_complete(self) -> bool:
        """The text may end here."""

    @property
    def is_stopped(self) -> bool:
        """The text must end here: nothing may follow."""

    def fork(self) -> "Matcher":
        """Another one in the same state."""


class CompiledGrammar(Protocol):
    """What a backend made of a source. Shared by any number of texts and threads.

    backend    its name
    num_bytes  memory it holds, as far as the backend tells; an estimate otherwise
    """

    @property
    def backend(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...

    def matcher(self) -> Matcher:
        """One for a text that begins."""


class Backend(Protocol):
    """Compiles sources for one vocabulary.

    name, version   of the library, e.g. "xgrammar", "0.2.9"
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Raises ValueError, in words that repeat at most 200 characters of the source, for what it cannot compile."""

    def fill_batch(self, matchers: list[Matcher], rows: list[Int32]) -> dict[int, str]:
        """`fill` for each, in parallel where the library can; index -> why for those that failed."""


class Compilation(Protocol):
    """A grammar that is being compiled, or was."""

    @property
    def done(self) -> bool:
        """`result` can be asked."""

    def result(self) -> CompiledGrammar:
        """Raises RequestError: why the grammar cannot be followed."""

    @property
    def ending(self) -> tuple[int, ...] | None:
        """With close_on_length: a short whole text, as tokens; None: none was found. Raises as `result`."""

    @property
    def seconds(self) -> float:
        """That the source took to compile, maybe for another request. Raises as `result`."""


class Check(Protocol):
    """What a grammar would cost, found out some time later (check.py)."""

    @property
    def done(self) -> bool:
        """`result` can be asked."""

    def result(self) -> dict[str, Any]:
        """Plain fields of the answer."""


class Compiler(Protocol):
    """What the engine's loop asks of the compile service (service.py)."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def submit(self, grammar: Grammar) -> Compilation:
        """Begin to compile. Never blocks."""

    def check(self, grammar: Grammar) -> Check:
        """Begin to compile it and to measure what its masks cost. Never blocks."""

    def wait(self, seconds: float) -> None:
        """Block until something that is being compiled is done, at most so long."""

    def backend(self, name: str) -> Backend:
        """Of a grammar that was compiled."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, by names that begin with "grammar_"."""

    def close(self) -> None:
        """Refuse what is pending. Idempotent."""

"""Compiles what texts must follow, beside the engine's loop. Knows no request and no step.

    compilation = service.submit(grammar)    # never blocks
    compilation.done                         # polled; the engine does so every step
    compilation.result()                     # CompiledGrammar, or raises why not

    Grammar ─► sources, one after the other until one compiles
                 │
                 ├─ cached: compiled, or refused a moment ago
                 ├─ in flight: whoever else wants it waits for the same
                 └─ a thread of its own  ──► risky: tried out in a child process first (sandbox.py)
                                         ──► compiled; after `compile_seconds` nobody waits for it any longer

A thread cannot be stopped. One that is overdue is a zombie: it is counted, and while there is any, all sources are tried
out in the child first; with MOST_ZOMBIES nothing new is compiled. Nothing is imported before the first grammar comes.
"""

import logging
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from trunkline.config import GrammarConfig
from trunkline.constraint import Grammar, GrammarSource
from trunkline.errors import Overloaded, RequestError
from trunkline.grammar.backends import registry
from trunkline.grammar.check import Check
from trunkline.grammar.closing import find_ending
from trunkline.grammar.interface import Backend, CompiledGrammar, GrammarRefused, MatcherFailed
from trunkline.grammar.sandbox import Sandbox, SandboxFailed, shorten
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.messages import Totals

logger = logging.getLogger("trunkline.grammar")

REFUSED_SECONDS = 60.0  # for so long a refused source is refused again without looking
MOST_REFUSED = 4096  # sources that are remembered so
# Seconds that compilations are counted by.
COMPILE_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
MOST_ZOMBIES = 4
MOST_WAITING = 256  # sources that wait for a thread,
WAITING_SECONDS = 30.0  # and for how long
RETRY_SECONDS = 5.0  # after which it may be worth while to ask again
LOADING_SECONDS = 240.0  # to import backends, here and in the child; that does not count as compiling


class Key(NamedTuple):
    """What is compiled. The vocabulary and the versions of the backends stay as they are as long as the process lives."""

    backend: str
    kind: str
    text: str

    @classmethod
    def of(cls, source: GrammarSource) -> "Key":
        return cls(source.backend, source.kind, source.text)


class Compiled(NamedTuple):
    """What came of a source.

    seconds       that it took to compile
    has_ending    an ending was searched,
    ending        and this is it: a short whole text, in tokens; None: none was found
    """

    grammar: CompiledGrammar
    seconds: float
    has_ending: bool = False
    ending: tuple[int, ...] | None = None


class Refusal(NamedTuple):
    """Why a source did not compile: half a sentence.

    until       on the clock, as long as it is remembered
    is_counted  a request has met it; checks, which only ask, don't count
    """

    backend: str
    reason: str
    timed_out: bool = False
    until: float = 0.0
    is_counted: bool = False


Outcome = Compiled | Refusal | RequestError  # RequestError: not the source's fault, nothing is known about it


class Compilation:
    """A grammar that is being compiled, or was. For the engine's thread.

    is_check  nobody is to write by it: somebody only asks
    """

    def __init__(self, service: "CompileService", grammar: Grammar, *, is_check: bool = False) -> None:
        self.grammar = grammar
        self.is_check = is_check
        self.refusals: list[Refusal] = []  # of its first sources
        self.outcome: Compiled | RequestError | None = None
        self._service = service

    @property
    def done(self) -> bool:
        """`result` can be asked."""
        if self.outcome is None:
            self._service.expire()
        return self.outcome is not None

    def result(self) -> CompiledGrammar:
        """Raises GrammarRefused (400) if no source compiles, and Overloaded (503) if there was no way to find out."""
        return self._compiled().grammar

    @property
    def ending(self) -> tuple[int, ...] | None:
        """With close_on_length: the shortest whole text that was found, as tokens; None: none was. Raises as `result`."""
        return self._compiled().ending

    @property
    def seconds(self) -> float:
        """That the source took to compile, maybe for another request. Raises as `result`."""
        return self._compiled().seconds

    def _compiled(self) -> Compiled:
        assert self.outcome is not None, "the grammar is not compiled yet"
        if isinstance(self.outcome, RequestError):
            raise self.outcome
        return self.outcome


@dataclass(kw_only=True, eq=False)
class Flight:
    """One source on its way.

    is_vetted  it is tried out in the child first
    known      it is compiled already, and only its ending is not known
    deadline   on the clock: when nobody waits for it any longer. First for its turn, then until the backend is loaded
               (and the child has looked at it), then for the source itself
    """

    source: GrammarSource
    with_ending: bool
    is_vetted: bool
    known: Compiled | None
    deadline: float
    is_compiling: bool = False
    waiting: list[Compilation] = field(default_factory=list)


class CompileService:
    """Compiles grammars, and keeps what it compiled.

    make_vocabulary  called once, with the first grammar
    clock            seconds, monotonic
    make_backend     by name, for a vocabulary; called once per name
    make_sandbox     for risky sources; called when the first comes

    `submit`, `wait`, `expire` and the compilations are for one thread, the engine's; the rest may be called by any.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        config: GrammarConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        make_backend: Callable[[str, Vocabulary], Backend] = registry.make,
        make_sandbox: Callable[[Callable[[], Vocabulary]], Sandbox] = Sandbox,
    ) -> None:
        self.config = config
        self.clock = clock
        self._make_vocabulary = make_vocabulary
        self._make_backend = make_backend
        self._loading = threading.Lock()  # guards the next two while they are made
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, Backend] = {}
        self._sandbox = make_sandbox(lambda: self.vocabulary)

        self._changed = threading.Condition()  # guards everything below
        self._has_news = False  # something landed since `wait` returned
        self._closed = False
        self._cache: OrderedDict[Key, Compiled] = OrderedDict()  # least recently used first
        self._refused: OrderedDict[Key, Refusal] = OrderedDict()  # oldest first
        self._flights: dict[tuple[Key, bool], Flight] = {}  # all but zombies; by key and with_ending
        self._queues: dict[bool, deque[Flight]] = {False: deque(), True: deque()}  # by is_vetted, who waits for a turn
        self._running: dict[bool, set[Flight]] = {False: set(), True: set()}
        self._zombies: set[Flight] = set()
        self._checks: set[Check] = set()  # that are not done
        self._compile_seconds: defaultdict[str, Totals] = defaultdict(lambda: Totals.within(*COMPILE_BOUNDS))
        self._num_refused: dict[str, int] = {}
        self._hits = self._misses = 0

    # ---------------------------------------------------------------- for the engine

    def submit(self, grammar: Grammar) -> Compilation:
        """Begin to compile, or find it compiled. Never blocks."""
        return self._submit(Compilation(self, grammar))

    def _submit(self, compilation: Compilation) -> Compilation:
        with self._changed:
            self._expire()
            self._advance(compilation)
        return compilation

    def check(self, grammar: Grammar) -> Check:
        """Begin to find out what a grammar costs: it is compiled like any other, then measured. Never blocks."""
        with_ending = msgspec.structs.replace(grammar, close_on_length=True)
        compilation = self._submit(Compilation(self, with_ending, is_check=True))
        check = Check(compilation, lambda: self.vocabulary, self._on_check)
        with self._changed:
            self._checks.add(check)
        return check

    def _on_check(self, check: Check) -> None:
        with self._changed:
            self._checks.discard(check)
            self._has_news = True
            self._changed.notify_all()

    @property
    def has_work(self) -> bool:
        """Something is being compiled or measured that somebody may wait for."""
        return bool(self._flights or self._checks)

    def wait(self, seconds: float) -> None:
        """Block until something that was pending is done, at most so many seconds; not at all if nothing is pending."""
        with self._changed:
            self._expire()
            if self.has_work and not self._has_news:
                left = [flight.deadline - self.clock() for flight in self._flights.values()]
                self._changed.wait(max(0.0, min([seconds, *left])))
                self._expire()
            self._has_news = False

    def expire(self) -> None:
        """Give up on what is overdue."""
        with self._changed:
            self._expire()

    @property
    def vocabulary(self) -> Vocabulary:
        """Built when it is first asked for."""
        if self._vocabulary is not None:  # the engine's thread never waits for what others load
            return self._vocabulary
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def backend(self, name: str) -> Backend:
        """Loaded when it is first asked for, which may take seconds. Raises what loading raises."""
        if (loaded := self._backends.get(name)) is not None:
            return loaded
        vocabulary = self.vocabulary
        with self._loading:
            if name not in self._backends:
                self._backends[name] = self._make_backend(name, vocabulary)
            return self._backends[name]

    def stats(self) -> dict[str, Any]:
        """Counters since start and gauges of now; plain numbers."""
        with self._changed:
            return {
                "grammar_compile_seconds": msgspec.to_builtins(self._compile_seconds),
                "grammar_refused_total": dict(self._num_refused),
                "grammar_cache_bytes": sum(entry.grammar.num_bytes for entry in self._cache.values()),
                "grammar_cache_entries": len(self._cache),
                "grammar_cache_hits_total": self._hits,
                "grammar_cache_misses_total": self._misses,
                "grammar_compiling": len(self._flights),
                "grammar_zombies": len(self._zombies),
                "grammar_sandbox_starts_total": self._sandbox.num_started,
            }

    def close(self) -> None:
        """Refuse what is pending, and end the child. Threads that compile are left alone. Idempotent."""
        with self._changed:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()
            for flight in list(self._flights.values()):
                self._settle(flight, self._overloaded("The engine is shutting down."))
        self._sandbox.close()

    # ---------------------------------------------------------------- from source to source

    def _advance(self, compilation: Compilation) -> None:
        """Go on with the first source that was not refused: take it from the cache, join its flight, or start one."""
        grammar = compilation.grammar
        while compilation.outcome is None:
            if len(compilation.refusals) == len(grammar.sources):
                compilation.outcome = self._refuse(compilation)
                return
            source = grammar.sources[len(compilation.refusals)]
            key = Key.of(source)
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                if known.has_ending or not grammar.close_on_length:
                    self._hits += 1
                    compilation.outcome = known
                    return
            refusal = self._refused.get(key)
            if refusal is not None and refusal.until > self.clock():
                if not (compilation.is_check or refusal.is_counted):
                    self._num_refused[key.backend] = self._num_refused.get(key.backend, 0) + 1
                    refusal = self._refused[key] = refusal._replace(is_counted=True)
                compilation.refusals.append(refusal)
                continue
            if self._closed:
                compilation.outcome = self._overloaded("The engine is shutting down.")
                return
            flight = self._flights.get((key, grammar.close_on_length))
            if flight is None:
                self._misses += 1
                flight = self._start(source, grammar.close_on_length, known)
            if flight is None:
                compilation.outcome = self._overloaded("Too many grammars are being compiled already.")
                return
            flight.waiting.append(compilation)
            return

    def _start(self, source: GrammarSource, with_ending: bool, known: Compiled | None) -> Flight | None:
        """None: that would be too much."""
        is_vetted = known is None and (source.is_risky or bool(self._zombies))
        queue = self._queues[is_vetted]
        if len(queue) >= MOST_WAITING or len(self._zombies) >= MOST_ZOMBIES:
            return None
        flight = Flight(
            source=source,
            with_ending=with_ending,
            is_vetted=is_vetted,
            known=known,
            deadline=self.clock() + WAITING_SECONDS,
        )
        self._flights[Key.of(source), with_ending] = flight
        queue.append(flight)
        self._dispatch()
        return flight

    def _dispatch(self) -> None:
        """Give threads to those in turn. One source at a time is tried out; it takes no thread away from the others."""
        for is_vetted, most in ((False, self.config.compile_threads), (True, 1)):
            queue, running = self._queues[is_vetted], self._running[is_vetted]
            while queue and len(running) < most:
                flight = queue.popleft()
                flight.deadline = self.clock() + LOADING_SECONDS
                running.add(flight)
                threading.Thread(target=self._fly, args=(flight,), name="trunkline-grammar", daemon=True).start()

    def _refuse(self, compilation: Compilation) -> GrammarRefused:
        """What its sources were refused for, in one sentence or two."""
        grammar, refusals = compilation.grammar, compilation.refusals
        reasons = (
            "; ".join(f"{refusal.backend}: {refusal.reason.rstrip('.')}" for refusal in refusals)
            or "it names no backend"
        )
        timed_out = any(refusal.timed_out for refusal in refusals)
        advice = (
            " Make it smaller: fewer alternatives, shorter bounded repeats in patterns, less nesting."
            if timed_out
            else ""
        )
        return GrammarRefused(
            f"The grammar of '{grammar.where}' cannot be compiled: {reasons}.{advice}",
            param=grammar.where,
            code="grammar_timeout" if timed_out else None,
        )

    def _overloaded(self, why: str) -> Overloaded:
        error = Overloaded(f"{why} Please try again in {RETRY_SECONDS:g} seconds.", code="grammar_overloaded")
        error.retry_after = RETRY_SECONDS
        return error

    # ---------------------------------------------------------------- the end of a flight

    def _expire(self) -> None:
        """Those that had their turn go on as zombies; the others are out of the queue."""
        now = self.clock()
        for flight in [flight for flight in self._flights.values() if flight.deadline <= now]:
            queue, running = self._queues[flight.is_vetted], self._running[flight.is_vetted]
            if flight not in running:
                queue.remove(flight)
                self._settle(flight, self._overloaded("Too many grammars wait to be compiled."))
                continue
            running.discard(flight)
            self._zombies.add(flight)
            if flight.is_compiling:
                reason = f"took more than {self.config.compile_seconds:g} seconds to compile"
                self._settle(flight, Refusal(flight.source.backend, reason, timed_out=True))
            else:
                self._settle(flight, self._overloaded(f"The {flight.source.backend} backend is still being loaded."))
        self._dispatch()

    def _land(self, flight: Flight, outcome: Outcome) -> None:
        """Its thread is at its end."""
        with self._changed:
            if flight in self._zombies:
                self._zombies.discard(flight)
                if isinstance(outcome, Compiled):  # late, but good for whoever asks next
                    self._keep(flight, outcome)
                return
            self._running[flight.is_vetted].discard(flight)
            if not self._closed:
                self._settle(flight, outcome)
                self._dispatch()

    def _settle(self, flight: Flight, outcome: Outcome) -> None:
        """Tell those who wait."""
        key = Key.of(flight.source)
        self._flights.pop((key, flight.with_ending))
        if isinstance(outcome, Compiled):
            self._keep(flight, outcome)
        elif isinstance(outcome, Refusal):
            self._refused.pop(key, None)
            self._refused[key] = outcome._replace(until=self.clock() + REFUSED_SECONDS)
            if len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)
        for compilation in flight.waiting:
            if isinstance(outcome, Refusal):
                self._advance(compilation)  # which finds it among the refused
            else:
                compilation.outcome = outcome
        self._has_news = True
        self._changed.notify_all()

    def _keep(self, flight: Flight, compiled: Compiled) -> None:
        """In the cache, as far as there is room. What is evicted stays good for those who have it."""
        key = Key.of(flight.source)
        self._refused.pop(key, None)
        self._cache[key] = compiled
        self._cache.move_to_end(key)
        if flight.known is None:
            self._compile_seconds[key.backend].add(compiled.seconds)
        # Some grow as texts are followed: what they hold is asked anew.
        num_bytes = sum(entry.grammar.num_bytes for entry in self._cache.values())
        while num_bytes > self.config.cache_bytes:
            num_bytes -= self._cache.popitem(last=False)[1].grammar.num_bytes

    # ---------------------------------------------------------------- in a thread

    def _fly(self, flight: Flight) -> None:
        try:
            outcome = self._compile(flight)
        except BaseException as error:  # a panic in a Rust library is one; this thread has nobody above it to tell
            logger.exception("The %s backend failed in a way that it should not.", flight.source.backend)
            outcome = Refusal(flight.source.backend, f"failed: {shorten(error)}")
        self._land(flight, outcome)

    def _compile(self, flight: Flight) -> Outcome:
        source = flight.source
        if flight.is_vetted:
            try:
                verdict = self._sandbox.vet(source, seconds=self.config.compile_seconds / 2)
            except SandboxFailed as error:
                return self._overloaded(str(error))
            if not verdict.ok:
                return Refusal(source.backend, verdict.reason, verdict.timed_out)
        try:
            backend = self.backend(source.backend)
        except Exception as error:
            logger.exception("The %s backend cannot be loaded.", source.backend)
            return Refusal(source.backend, f"cannot be loaded: {shorten(error)}")
        with self._changed:
            started_at = self.clock()
            flight.deadline = started_at + self.config.compile_seconds
            flight.is_compiling = True
            self._changed.notify_all()  # whoever waits, waits for an earlier deadline now
        if flight.known is not None:
            grammar, seconds = flight.known.grammar, flight.known.seconds
        else:
            try:
                grammar = backend.compile(source)
            except ValueError as error:
                return Refusal(source.backend, shorten(error))
            seconds = self.clock() - started_at
        if not flight.with_ending:
            return Compiled(grammar, seconds)
        return Compiled(grammar, seconds, has_ending=True, ending=self._ending(grammar))

    def _ending(self, grammar: CompiledGrammar) -> tuple[int, ...] | None:
        try:
            ending = find_ending(grammar.matcher(), self.vocabulary)
        except MatcherFailed:
            return None
        return None if ending is None else tuple(ending)

"""The compile service: single flight, sources in order, deadlines, zombies, both caches. The clock is the test's; the backend
is llguidance, held up where a test wants it."""

import json
import threading
from collections import Counter
from typing import Any

import pytest

from tests.grammar.matching import accepts, small_vocabulary
from tests.scheduler.factories import Clock
from trunkline.config import GrammarConfig
from trunkline.constraint import Grammar, GrammarSource
from trunkline.errors import Overloaded, RequestError
from trunkline.grammar import service as service_module
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.interface import Backend, CompiledGrammar, GrammarRefused
from trunkline.grammar.sandbox import Sandbox, SandboxFailed, Verdict
from trunkline.grammar.service import CompileService
from trunkline.grammar.vocabulary import Vocabulary

VOCABULARY = small_vocabulary()
PATIENCE = 30.0  # seconds a test waits for a thread; it never takes so long


class HeldBackend(LlguidanceBackend):
    """Counts what it compiles, and waits with sources that are held."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.compiled: Counter[str] = Counter()
        self.began: dict[str, threading.Event] = {}
        self.held: dict[str, threading.Event] = {}

    def hold(self, *sources: GrammarSource) -> None:
        for source in sources:
            self.began[source.text], self.held[source.text] = threading.Event(), threading.Event()

    def wait_until_began(self, source: GrammarSource) -> None:
        assert self.began[source.text].wait(PATIENCE)

    def release(self, *sources: GrammarSource) -> None:
        for source in sources:
            self.held[source.text].set()

    def compile(self, source: GrammarSource) -> Any:
        self.compiled[source.text] += 1
        if source.text in self.held:
            self.began[source.text].set()
            assert self.held[source.text].wait(PATIENCE)
        return super().compile(source)


class Watched(Sandbox):
    """A sandbox that no child is started for: it writes down what it is asked."""

    def __init__(self, vocabulary: Any, verdict: Verdict | None = None) -> None:
        super().__init__(vocabulary)
        self.asked: list[tuple[GrammarSource, float]] = []
        self.verdict = verdict or Verdict(ok=True)

    def vet(self, source: GrammarSource, *, seconds: float) -> Verdict:
        self.asked.append((source, seconds))
        return self.verdict


class Rig:
    """A service, and everything around it that a test may touch."""

    def __init__(self, *, verdict: Verdict | None = None, **config: Any) -> None:
        self.clock = Clock()
        self.backend = HeldBackend()
        self.made: list[str] = []
        self.sandbox = Watched(lambda: VOCABULARY, verdict)
        self.service = CompileService(
            self._vocabulary,
            GrammarConfig(**config),
            clock=self.clock,
            make_backend=self._make,
            make_sandbox=lambda _: self.sandbox,
        )

    def _vocabulary(self) -> Vocabulary:
        self.made.append("vocabulary")
        return VOCABULARY

    def _make(self, name: str, vocabulary: Vocabulary) -> Backend:
        self.made.append(name)
        if name == "broken":
            raise ImportError("no such library")
        return self.backend

    def submit(self, *sources: GrammarSource, **fields: Any) -> Any:
        return self.service.submit(Grammar(sources=sources, where="response_format", **fields))

    def finish(self, *compilations: Any) -> None:
        for _ in range(100):
            if all(compilation.done for compilation in compilations):
                return
            self.service.wait(PATIENCE)
        raise AssertionError("never done")

    def compile(self, *sources: GrammarSource, **fields: Any) -> CompiledGrammar:
        compilation = self.submit(*sources, **fields)
        self.finish(compilation)
        compiled: CompiledGrammar = compilation.result()
        return compiled

    def refused(self, *sources: GrammarSource, **fields: Any) -> RequestError:
        compilation = self.submit(*sources, **fields)
        self.finish(compilation)
        with pytest.raises(RequestError) as caught:
            compilation.result()
        return caught.value


def json_source(schema: Any, *, is_risky: bool = False, backend: str = "llguidance") -> GrammarSource:
    return GrammarSource(backend, "grammar", json.dumps({"grammars": [{"json_schema": schema}]}), is_risky)


def strings(number: int) -> GrammarSource:
    """A source that nobody else has."""
    return json_source({"const": f"text {number}"})


BAD = json_source({"type": "strng"})


def test_a_grammar_compiles_beside_the_caller() -> None:
    rig = Rig()
    assert rig.made == [] and not rig.service.has_work
    source = json_source({"type": "boolean"})
    rig.backend.hold(source)
    compilation = rig.submit(source)
    rig.backend.wait_until_began(source)
    assert not compilation.done and rig.service.has_work
    rig.backend.release(source)
    rig.finish(compilation)
    assert accepts(compilation.result(), VOCABULARY, "true")
    assert not accepts(compilation.result(), VOCABULARY, "7")
    assert rig.made == ["vocabulary", "llguidance"] and not rig.service.has_work


def test_who_wants_the_same_waits_for_the_same() -> None:
    rig = Rig()
    source = json_source({"type": "boolean"})
    rig.backend.hold(source)
    first = rig.submit(source)
    rig.backend.wait_until_began(source)
    second = rig.submit(source, after="</think>")
    third = rig.submit(BAD, source)
    while not third.refusals:
        rig.service.wait(PATIENCE)
    rig.backend.release(source)
    rig.finish(first, second, third)
    assert first.result() is second.result() is third.result()
    assert rig.compile(source) is first.result()
    assert rig.backend.compiled[source.text] == 1
    assert rig.service.stats()["grammar_cache_hits_total"] == 1


def test_sources_are_tried_in_order() -> None:
    rig = Rig()
    assert accepts(rig.compile(json_source({"type": "null"}), json_source({"type": "boolean"})), VOCABULARY, "null")
    assert accepts(rig.compile(BAD, json_source({"type": "boolean"})), VOCABULARY, "true")


def test_why_each_source_was_refused() -> None:
    error = Rig().refused(BAD, json_source({"type": "boolean"}, backend="broken"))
    assert isinstance(error, GrammarRefused)
    assert (error.status, error.code, error.param) == (400, "unsupported_grammar", "response_format")
    assert error.message == (
        "The grammar of 'response_format' cannot be compiled: llguidance: Invalid type: strng; broken: cannot be loaded: no such"
        " library."
    )
    assert "it names no backend" in Rig().refused().message


def test_a_refused_source_is_remembered_for_a_minute() -> None:
    rig = Rig()
    rig.refused(BAD)
    rig.clock.now += 59
    assert rig.submit(BAD).done
    assert rig.backend.compiled[BAD.text] == 1
    rig.clock.now += 1
    rig.refused(BAD)
    assert rig.backend.compiled[BAD.text] == 2
    assert rig.service.stats()["grammar_refused_total"] == {"llguidance": 2}


def test_a_refusal_that_only_a_check_has_met_is_not_counted() -> None:
    rig = Rig()
    check = rig.service.check(Grammar(sources=(BAD,)))
    rig.finish(check)
    assert check.result()["error"]
    assert rig.service.stats()["grammar_refused_total"] == {}
    rig.refused(BAD)
    rig.refused(BAD)
    assert rig.service.stats()["grammar_refused_total"] == {"llguidance": 1}, "a request has met it"
    assert rig.backend.compiled[BAD.text] == 1


def test_nobody_waits_beyond_the_deadline() -> None:
    rig = Rig(compile_seconds=5.0)
    source, other = json_source({"type": "boolean"}), json_source({"type": "null"})
    rig.backend.hold(source)
    compilation = rig.submit(source)
    rig.backend.wait_until_began(source)
    rig.clock.now += 4.9
    assert not compilation.done
    rig.clock.now += 0.1
    assert compilation.done
    with pytest.raises(GrammarRefused) as caught:
        compilation.result()
    assert (caught.value.status, caught.value.code) == (400, "grammar_timeout")
    assert "took more than 5 seconds" in caught.value.message and "Make it smaller" in caught.value.message
    assert rig.service.stats()["grammar_zombies"] == 1
    assert rig.submit(source).done  # it is remembered
    assert accepts(rig.compile(other), VOCABULARY, "null")  # others go on,
    assert rig.sandbox.asked == [(other, 2.5)]  # after somebody has looked at them
    rig.backend.release(source)


def test_what_comes_late_is_good_for_the_next() -> None:
    rig = Rig()
    source = json_source({"type": "boolean"})
    rig.backend.hold(source)
    before = set(threading.enumerate())
    compilation = rig.submit(source)
    rig.backend.wait_until_began(source)
    (thread,) = set(threading.enumerate()) - before
    rig.clock.now += 5
    assert compilation.done
    rig.backend.release(source)
    thread.join(PATIENCE)
    assert rig.service.stats()["grammar_zombies"] == 0
    assert accepts(rig.compile(source), VOCABULARY, "true")
    assert rig.backend.compiled[source.text] == 1
    with pytest.raises(GrammarRefused):
        compilation.result()


def test_with_too_many_zombies_nothing_new_is_compiled() -> None:
    rig = Rig(compile_threads=service_module.MOST_ZOMBIES)
    known = rig.compile(strings(99))
    sources = [strings(number) for number in range(service_module.MOST_ZOMBIES)]
    rig.backend.hold(*sources)
    compilations = [rig.submit(source) for source in sources]
    for source in sources:
        rig.backend.wait_until_began(source)
    rig.clock.now += 5
    assert all(compilation.done for compilation in compilations)
    error = rig.refused(json_source({"type": "boolean"}))
    assert isinstance(error, Overloaded)
    assert (error.status, error.code, error.retry_after) == (503, "grammar_overloaded", 5.0)
    assert rig.compile(strings(99)) is known
    rig.backend.release(*sources)


def test_only_so_many_compile_at_once_and_nobody_waits_for_ever() -> None:
    rig = Rig(compile_threads=1, compile_seconds=100.0)
    first, second = strings(1), strings(2)
    rig.backend.hold(first, second)
    ahead, behind = rig.submit(first), rig.submit(second)
    rig.backend.wait_until_began(first)
    assert not rig.backend.began[second.text].is_set()
    rig.clock.now += service_module.WAITING_SECONDS
    assert behind.done and not ahead.done
    with pytest.raises(Overloaded, match="Too many grammars wait"):
        behind.result()
    again = rig.submit(second)
    rig.backend.release(first, second)
    rig.finish(ahead, again)
    assert rig.backend.compiled[second.text] == 1


def test_a_risky_source_is_tried_out_first() -> None:
    rig = Rig(compile_seconds=4.0)
    risky = json_source({"type": "boolean"}, is_risky=True)
    assert accepts(rig.compile(risky), VOCABULARY, "true")
    assert accepts(rig.compile(json_source({"type": "null"})), VOCABULARY, "null")
    assert rig.sandbox.asked == [(risky, 2.0)]


def test_what_the_sandbox_refuses_is_never_compiled_here() -> None:
    rig = Rig(verdict=Verdict(ok=False, reason="took more than 2.5 seconds", timed_out=True))
    risky = json_source({"type": "boolean"}, is_risky=True)
    error = rig.refused(risky)
    assert error.code == "grammar_timeout" and "llguidance: took more than 2.5 seconds" in error.message
    assert rig.made == [] and not rig.backend.compiled
    assert accepts(rig.compile(risky, json_source({"type": "null"})), VOCABULARY, "null")


def test_a_source_is_not_blamed_for_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: GrammarSource, *, seconds: float) -> Verdict:
        raise SandboxFailed("There is no process to be had.")

    rig = Rig()
    monkeypatch.setattr(rig.sandbox, "vet", fail)
    risky = json_source({"type": "boolean"}, is_risky=True)
    error = rig.refused(risky)
    assert isinstance(error, Overloaded) and "no process to be had" in error.message
    monkeypatch.undo()
    assert accepts(rig.compile(risky), VOCABULARY, "true")


def test_the_cache_is_bounded_in_bytes_and_forgets_the_least_recently_used() -> None:
    size = Rig().compile(strings(0)).num_bytes
    rig = Rig(cache_bytes=2 * size + size // 2)
    first = rig.compile(strings(0))
    rig.compile(strings(1))
    assert rig.compile(strings(0)) is first
    rig.compile(strings(2))  # strings(1) goes
    stats = rig.service.stats()
    assert stats["grammar_cache_entries"] == 2 and stats["grammar_cache_bytes"] <= 2 * size + size // 2
    assert rig.compile(strings(0)) is first
    rig.compile(strings(1))  # strings(2) goes
    assert rig.backend.compiled == {strings(0).text: 1, strings(1).text: 2, strings(2).text: 1}


def test_what_is_too_large_for_the_cache_is_good_all_the_same() -> None:
    rig = Rig(cache_bytes=1)
    assert accepts(rig.compile(json_source({"type": "boolean"})), VOCABULARY, "true")
    assert rig.service.stats()["grammar_cache_entries"] == 0


def test_the_shortest_ending_is_searched_where_it_is_wanted() -> None:
    rig = Rig()
    source = json_source({"type": "array", "minItems": 1, "items": {"type": "boolean"}})
    plain = rig.submit(source)
    rig.finish(plain)
    closing = rig.submit(source, close_on_length=True)
    rig.finish(closing)
    assert plain.ending is None
    assert b"".join(VOCABULARY.tokens[token] for token in closing.ending) == b"[true]"
    assert closing.result() is plain.result()
    assert rig.submit(source, close_on_length=True).done
    assert rig.backend.compiled[source.text] == 1


def test_waiting_for_nothing_takes_no_time() -> None:
    rig = Rig()
    waiter = threading.Thread(target=rig.service.wait, args=(2 * PATIENCE,), daemon=True)
    waiter.start()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()


def test_closing_refuses_what_is_pending() -> None:
    rig = Rig(compile_threads=1)
    sources = strings(1), strings(2)
    rig.backend.hold(*sources)
    running, queued = (rig.submit(source) for source in sources)
    rig.backend.wait_until_began(sources[0])
    rig.service.close()
    rig.service.close()
    for compilation in (running, queued, rig.submit(strings(3))):
        assert compilation.done
        with pytest.raises(Overloaded, match="shutting down"):
            compilation.result()
    rig.backend.release(*sources)


def test_what_compiling_took_is_counted_by_backend() -> None:
    rig = Rig()
    source = strings(1)
    rig.backend.hold(source)
    compilation = rig.submit(source)
    rig.backend.wait_until_began(source)
    rig.clock.now += 2
    rig.backend.release(source)
    rig.finish(compilation)
    assert compilation.seconds == 2
    measured = rig.service.stats()["grammar_compile_seconds"]["llguidance"]
    assert (measured["sum"], measured["count"]) == (2.0, 1)
    assert dict(zip(measured["bounds"], measured["counts"], strict=True))[2.5] == sum(measured["counts"]) == 1


def test_a_check_measures_what_a_grammar_costs() -> None:
    rig = Rig()
    source = json_source({"type": "boolean"})
    for sources, backend in (((source,), "llguidance"), ((BAD,), None)):
        check = rig.service.check(Grammar(sources=sources))
        rig.finish(check)
        answer = check.result()
        assert answer["backend"] == backend
        assert (answer["error"] is None) == (backend is not None)
        if backend is not None:
            assert answer["shortest_tokens"] == len(VOCABULARY.encode(b"true")) and answer["num_bytes"] > 0
            assert 0 <= answer["mask_us"] <= answer["mask_us_max"]
    assert not rig.service.has_work

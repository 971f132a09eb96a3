"""The child that tries sources out: real processes, real libraries, and grammars that are meant to hurt."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.grammar.matching import accepts, small_vocabulary
from trunkline.config import GrammarConfig
from trunkline.constraint import Grammar, GrammarSource
from trunkline.errors import RequestError
from trunkline.grammar.sandbox import Sandbox, SandboxFailed
from trunkline.grammar.service import CompileService
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = small_vocabulary()
SECONDS = 10.0  # that a harmless source may take, on a machine that has other things to do
PATIENCE = 30.0


def llguidance(schema: Any) -> GrammarSource:
    return GrammarSource("llguidance", "grammar", json.dumps({"grammars": [{"json_schema": schema}]}), True)


def xgrammar(schema: Any) -> GrammarSource:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    return GrammarSource("xgrammar", "structural_tag", json.dumps(tag), True)


def outlines(pattern: str) -> GrammarSource:
    return GrammarSource("outlines", "regex", pattern, True)


def in_property(schema: Any) -> Any:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def nested(depth: int) -> str:
    """Objects in objects, as text: Python's own encoder stops at a thousand."""
    return '{"type": "object", "properties": {"a": ' * depth + '{"type": "string"}' + '}, "required": ["a"]}' * depth


def either(depth: int) -> Any:
    return {"type": "integer"} if not depth else {"anyOf": [either(depth - 1)] * 2}


HARMLESS = llguidance({"type": "boolean"})
ENDLESS = outlines(".{10000,}")
MANY = {"enum": [f"value{number}" for number in range(50_000)]}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(lambda: VOCABULARY)
    yield sandbox
    sandbox.close()


def wait_for_end(pid: int) -> None:
    """Of any process, not only of one's own child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], PATIENCE)[0], "it lives on"
    finally:
        os.close(fd)


def test_what_a_source_costs_and_why_it_is_refused(sandbox: Sandbox) -> None:
    assert sandbox.pid is None
    verdict = sandbox.vet(HARMLESS, seconds=SECONDS)
    assert verdict.ok and verdict.num_bytes > 0 and 0 < verdict.compile_seconds < SECONDS
    verdict = sandbox.vet(llguidance({"type": "strng"}), seconds=SECONDS)
    assert (verdict.ok, verdict.timed_out, verdict.reason) == (False, False, "Invalid type: strng")
    assert sandbox.vet(GrammarSource("nobody", "", ""), seconds=SECONDS).reason == "cannot be loaded: 'nobody'"
    # Killed in the middle; the child lives on for the next.
    verdict = sandbox.vet(llguidance(MANY), seconds=0.01)
    assert not verdict.ok and verdict.timed_out and "took more than 0.01 seconds" in verdict.reason
    assert sandbox.vet(HARMLESS, seconds=SECONDS).ok
    assert sandbox.num_started == 1


def test_it_starts_again_when_its_child_has_died(sandbox: Sandbox) -> None:
    assert sandbox.vet(HARMLESS, seconds=SECONDS).ok
    assert sandbox.pid is not None
    os.kill(sandbox.pid, signal.SIGKILL)
    wait_for_end(sandbox.pid)
    assert sandbox.vet(HARMLESS, seconds=SECONDS).ok
    assert sandbox.num_started == 2


@pytest.mark.slow
def test_an_idle_child_ends_by_itself() -> None:
    sandbox = Sandbox(lambda: VOCABULARY, idle_seconds=0.01)
    assert sandbox.vet(HARMLESS, seconds=SECONDS).ok
    assert sandbox.pid is not None
    wait_for_end(sandbox.pid)
    sandbox.close()


@pytest.mark.slow
def test_the_child_does_not_outlive_the_engine(tmp_path: Path) -> None:
    program = f"""
import sys
from tests.grammar.test_sandbox import ENDLESS, HARMLESS, SECONDS, VOCABULARY
from trunkline.grammar.sandbox import Sandbox
sandbox = Sandbox(lambda: VOCABULARY)
assert sandbox.vet(HARMLESS, seconds=SECONDS).ok
print(sandbox.pid, flush=True)
sandbox.vet(ENDLESS, seconds={PATIENCE * 10})
"""
    engine = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    engine.kill()
    engine.wait()
    engine.stdout.close()
    wait_for_end(pid)


@pytest.mark.slow
def test_closing_ends_whoever_waits(sandbox: Sandbox) -> None:
    assert sandbox.vet(HARMLESS, seconds=SECONDS).ok
    caught: list[BaseException] = []

    def vet() -> None:
        try:
            sandbox.vet(ENDLESS, seconds=PATIENCE * 10)
        except SandboxFailed as error:
            caught.append(error)

    thread = threading.Thread(target=vet)
    thread.start()
    pid = sandbox.pid
    sandbox.close()
    sandbox.close()
    thread.join(PATIENCE)
    assert len(caught) == 1 and pid is not None
    wait_for_end(pid)
    with pytest.raises(SandboxFailed, match="shutting down"):
        sandbox.vet(HARMLESS, seconds=SECONDS)


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    sandbox = Sandbox(lambda: VOCABULARY, most_bytes=2**20)
    verdict = sandbox.vet(outlines("[^a]{1,3000}"), seconds=SECONDS)
    assert not verdict.ok and not verdict.timed_out
    assert "crashed the process that tried it out (SIGABRT), which may use 1 MiB more memory" in verdict.reason
    assert sandbox.vet(outlines("yes|no"), seconds=SECONDS).ok
    assert sandbox.num_started == 1
    sandbox.close()


@pytest.mark.slow
def test_grammars_that_hurt_are_bounded_in_time(sandbox: Sandbox) -> None:
    """Which of them a library can do is its own affair, and changes with its version. That all end, and that the child is
    as before, is ours."""
    deep = f'{{"type": "structural_tag", "format": {{"type": "json_schema", "json_schema": {nested(900)}}}}}'
    doubling: Any = {"$defs": {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(20)}}
    doubling["$defs"]["a20"] = {"type": "integer"}
    sources = [
        xgrammar(MANY),
        xgrammar(either(12)),
        GrammarSource("xgrammar", "structural_tag", deep, True),
        xgrammar(in_property({"type": "string", "pattern": "^((a|b)*){1000}$"})),
        xgrammar({**doubling, "$ref": "#/$defs/a0"}),
        GrammarSource("xgrammar", "ebnf", 'root ::= root "a" | root', True),
        GrammarSource("xgrammar", "ebnf", 'root ::= ("a" | "b"){1000000}', True),
        GrammarSource("xgrammar", "ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, True),
        llguidance(MANY),
        llguidance(either(12)),
        llguidance(json.loads(nested(200))),
        llguidance({**doubling, "$ref": "#/$defs/a0"}),
        llguidance({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        llguidance({"type": "string", "minLength": 10_000}),
        llguidance(in_property({"type": "string", "pattern": "^.*a.{20}$"})),
        ENDLESS,
        outlines("(a|b)*{1000}"),
        outlines(".*a.{20}"),
        outlines("(((x{1,100}){1,100}){1,100})"),
    ]
    for source in sources:
        verdict = sandbox.vet(source, seconds=1.0)
        assert verdict.ok or verdict.reason, source.text[:80]
        assert verdict.grown_bytes <= 2**31
    assert sandbox.vet(HARMLESS, seconds=SECONDS).ok
    assert sandbox.num_started == 1


@pytest.mark.slow
def test_masks_that_take_long_are_refused() -> None:
    sandbox = Sandbox(lambda: VOCABULARY, slowest_mask=1e-9)
    verdict = sandbox.vet(HARMLESS, seconds=SECONDS)
    sandbox.close()
    assert not verdict.ok and not verdict.timed_out and verdict.mask_seconds > 1e-9
    assert "ms to tell the allowed tokens, for every token of the text; at most 1e-06 ms are allowed" in verdict.reason


@pytest.mark.real
def test_bounded_repeats_over_wide_classes_are_too_slow_in_xgrammar() -> None:
    """Of a real vocabulary: 13 ms for every token, for a grammar that compiles in 33 ms (mlc-ai/xgrammar issue 863)."""
    tokenizer = load_tokenizer(builtin_model())
    sandbox = Sandbox(lambda: Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))
    slow = sandbox.vet(xgrammar(in_property({"type": "string", "pattern": r"^[^\n\r]{1,129}$"})), seconds=SECONDS)
    plain = sandbox.vet(xgrammar(in_property({"type": "string"})), seconds=SECONDS)
    sandbox.close()
    assert not slow.ok and "ms to tell the allowed tokens" in slow.reason
    assert plain.ok


@pytest.mark.slow
def test_a_service_lives_through_them() -> None:
    service = CompileService(lambda: VOCABULARY, GrammarConfig(compile_seconds=2.0))
    hostile = service.submit(Grammar(sources=(xgrammar(MANY), ENDLESS)))
    canary = service.submit(Grammar(sources=(GrammarSource("llguidance", "grammar", HARMLESS.text),)))
    while not canary.done:
        service.wait(PATIENCE)
    assert not hostile.done
    assert accepts(canary.result(), VOCABULARY, "true")
    while not hostile.done:
        service.wait(PATIENCE)
    with pytest.raises(RequestError, match=r"xgrammar: took more than 1 seconds .*outlines: took more than 1 seconds"):
        hostile.result()
    assert service.stats()["grammar_zombies"] == 0
    service.close()


@pytest.mark.slow
@pytest.mark.parametrize("source", [HARMLESS, llguidance(MANY)], ids=["short", "longer than a pipe"])
def test_a_child_that_stands_still_is_replaced(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, source: GrammarSource
) -> None:
    """It is not the source's fault, which another child then tries."""
    assert sandbox.vet(HARMLESS, seconds=SECONDS).ok
    monkeypatch.setattr("trunkline.grammar.sandbox.GRACE_SECONDS", 0.2)
    first = sandbox.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    verdict = sandbox.vet(source, seconds=SECONDS)
    assert verdict.ok, verdict.reason
    assert sandbox.num_started == 2 and sandbox.pid != first

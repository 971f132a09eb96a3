"""The engine's call "grammar_check": answered some steps later, while the engine goes on."""

from typing import Any

import msgspec
import pytest

from tests.grammar.test_service import BAD, Rig, json_source
from tests.scheduler.factories import generate, make_engine
from trunkline.constraint import Grammar, GrammarSource
from trunkline.messages import Call, Reply, Tokens
from trunkline.scheduler.engine import Engine


def ask(source: GrammarSource, call_id: int = 7) -> Call:
    grammar: dict[str, Any] = msgspec.to_builtins(Grammar(sources=(source,)))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(grammar))  # as it comes from another process
    return Call(call_id=call_id, method="grammar_check", args={"grammar": sent})


def steps(engine: Engine) -> list[Any]:
    """What the engine says until it has no more to do."""
    messages: list[Any] = []
    for _ in range(10_000):
        if not engine.has_work:
            return messages
        messages += engine.step()
    raise AssertionError("the engine never comes to an end")


def test_the_answer_comes_when_it_is_known() -> None:
    rig = Rig()
    engine = make_engine(grammars=rig.service)
    source = json_source({"type": "boolean"})
    rig.backend.hold(source)
    assert engine.handle(ask(source)) == []
    rig.backend.wait_until_began(source)
    engine.handle(generate("a", range(1, 9), max_tokens=3))
    said = [message for _ in range(12) for message in engine.step()]
    assert any(isinstance(message, Tokens) for message in said) and engine.has_work
    rig.backend.release(source)
    (reply,) = steps(engine)
    assert isinstance(reply, Reply) and reply.call_id == 7
    assert reply.result["backend"] == "llguidance" and reply.result["error"] is None
    assert set(reply.result) >= {"compile_ms", "mask_us", "mask_us_max", "num_bytes", "shortest_tokens"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply.result)) == reply.result


def test_a_refused_grammar_is_an_answer() -> None:
    engine = make_engine(grammars=Rig().service)
    engine.handle(ask(BAD))
    (reply,) = steps(engine)
    assert reply.error is None and reply.result["backend"] is None
    assert "Invalid type: strng" in reply.result["error"]


@pytest.mark.parametrize(
    ("with_service", "grammar", "why"),
    [
        (True, {"sources": 3}, "'grammar' is none"),
        (False, {"sources": []}, "no tokenizer"),
    ],
)
def test_what_cannot_be_asked(with_service: bool, grammar: dict[str, Any], why: str) -> None:
    engine = make_engine(grammars=Rig().service if with_service else None)
    (reply,) = engine.handle(Call(call_id=1, method="grammar_check", args={"grammar": grammar}))
    assert isinstance(reply, Reply) and reply.error is not None and why in reply.error
    assert not engine.has_work

"""A request's constraint on its way: what an answer says of a finished text, and what is an error."""

from types import SimpleNamespace
from typing import Any

import pytest

from trunkline.api.constrained import Call, Checks, Constrained, GrammarBroken, ended_by_itself
from trunkline.api.generation import OutputProcessor
from trunkline.api.metrics import Metrics
from trunkline.constraint import Constraint, Grammar, Tag, Tags
from trunkline.grammar.interface import Finding, GrammarRefused
from trunkline.grammar.postcheck import UNCHECKED, Verdict
from trunkline.grammar.prepare import Prepared

SCHEMA = {"type": "object", "required": ["a"]}
GOOD, BAD = '{"a": 1}', '{"b": 1}'
PREPARED = Prepared(grammar=Grammar(sources=()), backends={}, checks=(("guided_json", SCHEMA),))


class Choice(SimpleNamespace):
    """As much of an OutputProcessor as is looked at."""

    def __init__(self, text: str, **fields: Any) -> None:
        ended = {"finish_reason": "stop", "stop_reason": None, "closed": False, "grammar_backend": "llguidance"}
        super().__init__(text=text, token_ids=[0] * len(text), **{**ended, **fields})


def choice(text: str, **fields: Any) -> OutputProcessor:
    return Choice(text, **fields)  # type: ignore[return-value]


class Llm:
    """Prepares as it is told."""

    def __init__(self, outcome: Prepared | GrammarRefused) -> None:
        self.outcome = outcome

    async def prepare(self, constraint: Constraint) -> Prepared:
        if isinstance(self.outcome, GrammarRefused):
            raise self.outcome
        return self.outcome


def service(outcome: Prepared | GrammarRefused = PREPARED) -> Any:
    return SimpleNamespace(llm=Llm(outcome), metrics=Metrics("m"))


def failures(service: Any) -> float:
    return (
        service.metrics.registry.get_sample_value(
            "trunkline:grammar_postcheck_failures_total", {"backend": "llguidance"}
        )
        or 0.0
    )


def constraint(**fields: Any) -> Constraint:
    return Constraint(**{"json_schema": SCHEMA, "where": "guided_json", "unsupported": "error", **fields})


async def test_a_free_text_says_nothing() -> None:
    free = await Constrained.of(service(), None)
    assert free.grammar is None
    assert await free.verdict(choice("anything")) == UNCHECKED
    assert free.fields(UNCHECKED) == {}


async def test_under_error_a_good_text_says_nothing_and_a_bad_one_is_our_bug(caplog: pytest.LogCaptureFixture) -> None:
    server = service()
    constrained = await Constrained.of(server, constraint())
    assert constrained.grammar is PREPARED.grammar
    assert constrained.fields(await constrained.verdict(choice(GOOD))) == {}
    with pytest.raises(GrammarBroken, match="not valid under 'required'") as broken:
        await constrained.verdict(choice(BAD))
    assert (broken.value.status, broken.value.code, broken.value.param) == (500, "grammar_broken", "guided_json")
    assert failures(server) == 1
    (record,) = caplog.records
    assert "by llguidance" in record.getMessage() and BAD not in record.getMessage()


async def test_under_validate_the_answer_says_what_was_found() -> None:
    server = service()
    constrained = await Constrained.of(server, constraint(unsupported="validate"))
    assert constrained.fields(await constrained.verdict(choice(GOOD))) == {"valid": True}
    error = "The text is not valid under 'required' of the schema, at /required."
    assert constrained.fields(await constrained.verdict(choice(BAD))) == {"valid": False, "validation_error": error}
    assert failures(server) == 0, "only bugs of ours count"
    cut = await constrained.verdict(choice('{"a', finish_reason="length"))
    assert constrained.fields(cut) == {"valid": None}


async def test_strict_is_error_whatever_the_policy() -> None:
    constrained = await Constrained.of(service(), constraint(unsupported="validate", strict=True))
    assert constrained.fields(await constrained.verdict(choice(GOOD))) == {}
    with pytest.raises(GrammarBroken):
        await constrained.verdict(choice(BAD))


async def test_a_long_text_is_looked_at_in_a_thread_with_the_same_result() -> None:
    constrained = await Constrained.of(service(), constraint())
    blanks = " " * 30_000
    assert await constrained.verdict(choice(GOOD + blanks)) == Verdict(True)
    with pytest.raises(GrammarBroken):
        await constrained.verdict(choice(BAD + blanks))


async def test_the_text_may_be_a_part_of_all_that_was_written() -> None:
    constrained = await Constrained.of(service(), constraint())
    assert await constrained.verdict(choice(f"<think>{BAD}</think>{GOOD}"), text=GOOD) == Verdict(True)


async def test_refusals_are_counted_by_the_backend_that_was_asked_for() -> None:
    server = service(GrammarRefused("No.", param="guided_json", findings=(Finding("", "not", "no"),)))
    for backend in ("auto", "xgrammar", "xgrammar"):
        with pytest.raises(GrammarRefused):
            await Constrained.of(server, constraint(backend=backend))
    assert server.metrics.grammar_refused == {"auto": 1, "xgrammar": 2}
    page = server.metrics.render(None).decode()
    assert 'trunkline:grammar_refused_total{backend="xgrammar"} 2.0' in page


@pytest.mark.parametrize(
    ("fields", "is_whole"),
    [
        ({}, True),
        ({"finish_reason": "length"}, False),
        ({"finish_reason": "length", "closed": True}, True),
        ({"finish_reason": "abort"}, False),
        ({"stop_reason": "}"}, False),
        ({"stop_reason": 17}, False),
    ],
)
def test_only_whole_texts_are_checked(fields: dict[str, Any], is_whole: bool) -> None:
    assert ended_by_itself(choice(BAD, **fields)) is is_whole
    assert Checks(constraint(), PREPARED).verdict(choice(BAD, **fields)).valid is (False if is_whole else None)


def tagged(instead: Tag | None = None) -> tuple[Constraint, Prepared]:
    tags = tuple(Tag(begin=name, json_schema="{}", end="", where=name) for name in ("t0", "t1"))
    both = Constraint(tags=Tags(tags=tags, forced=True, instead=instead), where="tools")
    checks = (("t0", SCHEMA), ("t1", {"type": "object"}), ("response_format", {"type": "array"}))
    return both, Prepared(grammar=Grammar(sources=()), backends={}, checks=checks)


@pytest.mark.parametrize(
    ("calls", "valid"),
    [
        ([], None),
        ([Call("t0", GOOD)], True),
        ([Call("t0", BAD)], False),
        ([Call("t1", BAD)], True),
        ([Call("t1", GOOD), Call("t0", BAD)], False),
        ([Call("t1", "[" * 5000), Call("t0", GOOD)], None),
        ([Call("t1", "[" * 5000), Call("t0", BAD)], False),
        ([Call("elsewhere", BAD)], None),
    ],
)
def test_of_calls_the_arguments_are_checked(calls: list[Call], valid: bool | None) -> None:
    assert Checks(*tagged()).verdict(choice("calls"), calls=calls).valid is valid


def test_an_answer_in_place_of_calls_is_checked_too() -> None:
    checks = Checks(*tagged(Tag(begin="", json_schema="{}", end="", where="response_format")))
    assert checks.verdict(choice("[1]")).valid is True
    assert checks.verdict(choice("{}")).valid is False
    assert checks.verdict(choice("{}"), calls=[Call("t0", GOOD)]).valid is True


def test_what_is_no_json_is_not_checked() -> None:
    prepared = Prepared(grammar=Grammar(sources=()), backends={})
    assert Checks(Constraint(regex="a"), prepared).verdict(choice("b")) == UNCHECKED

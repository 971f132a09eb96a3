"""Requests whose text must follow a grammar: waiting for it, forced tokens, groups, preemption, ends."""

from typing import Any

import pytest

from tests.scheduler.factories import Driver, ask, generate, make_engine, plans, run
from tests.stub import continuation
from tests.tiny_grammars import (
    EOS,
    TinyCompiler,
    constrained_continuation,
    ids,
    lark,
    text_of,
    tiny_vocabulary,
)
from trunkline.config import GrammarConfig
from trunkline.grammar.service import CompileService
from trunkline.messages import Abort, Tokens

OBJECT = lark(r"""start: "{\"name\":\"" /[a-z]{1,6}/ "\",\"age\":" /[1-9][0-9]?/ "}" """)
LETTERS = lark("start: /[a-d]{3,20}/")
CHOICE = lark('start: "the cab" | "the age"')
LIST = lark(r"""start: "[" item ("," item)* "]"
item: "true" | "null" | /[0-9]{1,3}/""")
GRAMMARS = [OBJECT, LETTERS, CHOICE, LIST]


# ---------------------------------------------------------------- the text


@pytest.mark.parametrize("forced_tokens", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_text_is_that_of_one_token_after_the_other(depth: int, forced_tokens: bool) -> None:
    engine = make_engine(depth=depth, grammars=TinyCompiler(), forced_tokens=forced_tokens, max_num_batched_tokens=24)
    asked = {f"r{i}": ([i + 1, *range(1, 3 * i)], GRAMMARS[i % 4]) for i in range(12)}
    free = {f"f{i}": [i + 40, 2, 3] for i in range(3)}
    outcomes = run(
        engine,
        *(ask(name, prompt, grammar, max_tokens=16) for name, (prompt, grammar) in asked.items()),
        *(generate(name, prompt, max_tokens=16) for name, prompt in free.items()),
    )
    for name, (prompt, grammar) in asked.items():
        tokens, reason = constrained_continuation(prompt, grammar, 16)
        outcome = outcomes[name]
        assert outcome.tokens == tokens, name
        assert outcome.finished is not None and outcome.finished.reason == reason
        assert outcome.finished.grammar_backend == "llguidance" and not outcome.finished.closed
        assert outcome.finished.completion_tokens == len(tokens)
        assert outcome.finished.stop_token_id == (EOS if tokens[-1] == EOS else None)
    for name, prompt in free.items():
        finished = outcomes[name].finished
        assert outcomes[name].tokens == continuation(prompt, 16) and finished is not None
        assert finished.grammar_backend == ""
    stats = engine.stats()
    assert stats["grammar_running"] == stats["grammar_waiting"] == 0
    assert stats["generation_tokens_total"] == sum(len(outcome.tokens) for outcome in outcomes.values())
    assert stats["grammar_mask_seconds"]["llguidance"]["count"] > 0
    assert (stats["spec_decode_num_draft_tokens_total"]["grammar"] > 0) == forced_tokens


def num_steps(grammar: Any, *, depth: int, max_tokens: int) -> int:
    """Steps that compute something, from the prompt to the end of one text."""
    engine = make_engine(depth=depth, grammars=TinyCompiler(), num_speculative_tokens=0)
    outcome = run(engine, ask("r", [5, 6], grammar, max_tokens=max_tokens))["r"]
    assert outcome.tokens == constrained_continuation([5, 6], grammar, max_tokens)[0]
    return sum(plan.num_tokens > 0 for plan in plans(engine))


def test_a_step_in_flight_does_not_hold_up_the_next() -> None:
    letters = lark("start: /[a-d]{30,40}/")
    num_tokens = num_steps(letters, depth=0, max_tokens=24)
    assert num_tokens > 20
    assert num_steps(letters, depth=1, max_tokens=24) <= num_tokens + 1  # the one ahead of the last is for nothing


def test_what_is_forced_saves_steps_with_one_in_flight_too() -> None:
    """The step that was planned ahead chooses the first forced token; then the others are known."""
    words = lark('start: /[a-d]/ "the same five words" /[a-d]/ "once more" /[a-d]/')
    num_tokens = len(constrained_continuation([5, 6], words, 64)[0])
    assert num_tokens > 20
    assert num_steps(words, depth=0, max_tokens=64) <= 4
    assert num_steps(words, depth=1, max_tokens=64) <= 7


def test_a_text_that_can_only_end_ends_without_a_token_for_it() -> None:
    engine = make_engine(grammars=TinyCompiler())
    outcome = run(engine, ask("r", [5, 6], lark('start: "ab" | "ba"')))["r"]
    assert text_of(outcome.tokens) in ("ab", "ba") and EOS not in outcome.tokens
    assert outcome.finished is not None and (outcome.finished.reason, outcome.finished.stop_token_id) == ("stop", None)


def test_a_grammar_of_nothing_writes_nothing() -> None:
    engine = make_engine(grammars=TinyCompiler())
    outcome = run(engine, ask("r", [5, 6], lark('start: ""')))["r"]
    assert outcome.finished is not None and (outcome.finished.reason, text_of(outcome.tokens)) == ("stop", "")


def test_nothing_is_compiled_for_who_wants_no_token() -> None:
    engine = make_engine(grammars=TinyCompiler(held=True))
    outcome = run(engine, ask("r", [5, 6], LETTERS, max_tokens=0))["r"]
    assert outcome.finished is not None and outcome.finished.reason == "length"


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_tokens": 9},
        {"ignore_eos": True},
        {"stop_token_ids": (ids("b")[0],)},
        {"stop_token_ids": (ids("b")[0],), "min_tokens": 6},
        {"stop_token_ids": (ids("9")[0],)},
        {"stop_token_ids": (EOS,), "ignore_eos": True},
        {"min_tokens": 14, "ignore_eos": True, "stop_token_ids": (ids("a")[0],)},
    ],
)
@pytest.mark.parametrize("grammar", [LETTERS, CHOICE, LIST])
def test_ends_that_count_and_ends_that_do_not(grammar: Any, sampling: dict[str, Any]) -> None:
    stops = sampling.get("stop_token_ids", ())
    named = {key: value for key, value in sampling.items() if key != "stop_token_ids"}
    for seed in range(5):
        prompt = [seed + 3, 9]
        engine = make_engine(grammars=TinyCompiler())
        outcome = run(engine, ask("r", prompt, grammar, max_tokens=16, **sampling))["r"]
        assert outcome.finished is not None
        expected = constrained_continuation(prompt, grammar, 16, stop_ids=stops, **named)
        assert (outcome.tokens, outcome.finished.reason) == expected


def test_an_engine_without_a_compiler_refuses() -> None:
    outcome = run(make_engine(), ask("r", [5, 6], LETTERS))["r"]
    assert outcome.failed is not None and (outcome.failed.status, outcome.failed.param) == (400, "constraint")


# ---------------------------------------------------------------- waiting for the grammar


@pytest.mark.parametrize("depth", [0, 1])
def test_the_prompt_is_read_while_the_grammar_compiles_all_but_its_last_token(depth: int) -> None:
    grammars = TinyCompiler(held=True)
    engine = make_engine(depth=depth, grammars=grammars, max_num_batched_tokens=8)
    driver = Driver(engine)
    prompt = list(range(1, 22))
    driver.send(ask("r", prompt, LETTERS), ask("one", [7], LETTERS))
    for _ in range(9):
        driver.step()
    assert engine.has_work and not driver.outcomes
    assert sum(plan.num_tokens for plan in plans(engine)) == 20
    assert engine.stats()["grammar_waiting"] == 2 and grammars.waits > 0
    grammars.held = False
    outcomes = driver.drain()
    for name, tokens in (("r", prompt), ("one", [7])):
        assert outcomes[name].tokens == constrained_continuation(tokens, LETTERS, 8)[0]
    assert engine.stats()["prompt_tokens_computed_total"] == 22


def test_others_are_served_meanwhile_and_who_shares_the_prefix_does_not_wait() -> None:
    grammars = TinyCompiler(held=True)
    engine = make_engine(grammars=grammars, page_size=4)
    driver = Driver(engine)
    prompt = list(range(1, 9))  # two whole pages, the last token of the second is not computed
    driver.send(ask("late", prompt, LETTERS))
    driver.step()
    driver.send(generate("free", [*prompt, 9, 10]))
    for _ in range(9):
        driver.step()
    assert driver.outcomes["free"].tokens == continuation([*prompt, 9, 10], 8)
    grammars.held = False
    assert driver.drain()["late"].tokens == constrained_continuation(prompt, LETTERS, 8)[0]


@pytest.mark.parametrize("held", [True, False])
def test_a_refused_grammar_fails_its_request_alone_and_keeps_the_prefix(held: bool) -> None:
    grammars = TinyCompiler(held=held)
    engine = make_engine(grammars=grammars, page_size=4)
    driver = Driver(engine)
    prompt = list(range(1, 12))
    driver.send(ask("bad", prompt, lark("start: nonsense_", where="response_format")), generate("good", [5]))
    for _ in range(3):
        driver.step()
    grammars.held = False
    outcomes = driver.drain()
    failed = outcomes["bad"].failed
    assert failed is not None
    assert (failed.status, failed.code, failed.param) == (400, "unsupported_grammar", "response_format")
    assert outcomes["good"].tokens == continuation([5], 8)
    if held:
        again = run(engine, generate("again", prompt))["again"]
        assert again.cached_tokens == 8, "two whole pages were read while it waited"


def test_a_grammar_may_be_late_for_one_who_is_preempted_meanwhile() -> None:
    grammars = TinyCompiler(held=True)
    engine = make_engine(grammars=grammars, num_pages=8, page_size=4, caching=False)
    driver = Driver(engine)
    driver.send(generate("old", range(1, 9), max_tokens=16), ask("late", range(20, 30), LETTERS))
    for _ in range(14):
        driver.step()
    assert engine.stats()["num_preemptions_total"]["recompute"] > 0
    grammars.held = False
    outcomes = driver.drain()
    assert outcomes["old"].tokens == continuation(list(range(1, 9)), 16)
    assert outcomes["late"].tokens == constrained_continuation(list(range(20, 30)), LETTERS, 8)[0]


# ---------------------------------------------------------------- forced tokens


def test_forced_tokens_save_steps_and_arrive_together() -> None:
    prompt, num_steps, texts = [3, 1, 4], [], []
    for forced_tokens in (False, True):
        engine = make_engine(grammars=TinyCompiler(), forced_tokens=forced_tokens)
        outcome = run(engine, ask("r", prompt, OBJECT, max_tokens=40))["r"]
        num_steps.append(len(plans(engine)))
        texts.append(outcome.tokens)
    first, *_ = (message for message in outcome.messages if isinstance(message, Tokens))
    assert text_of(first.token_ids).startswith('{"name":"') and len(first.token_ids) == len(ids('{"name":"')) + 1
    assert first.prefill_seconds is not None
    assert texts[0] == texts[1] and num_steps[0] == len(texts[0])
    forced = engine.stats()["spec_decode_num_accepted_tokens_total"]["grammar"]
    assert forced >= len(ids('{"name":"","age":}')) - 2 and num_steps[1] <= num_steps[0] - forced
    assert plans(engine)[0].num_tokens == len(prompt) + len(ids('{"name":"')), (
        "they are read with the prompt's last tokens"
    )


def test_forced_tokens_are_computed_with_one_row_of_logits() -> None:
    engine = make_engine(grammars=TinyCompiler())
    run(engine, ask("r", [3, 1, 4], OBJECT, max_tokens=40))
    assert all(len(plan.rows) == 1 for plan in plans(engine))
    assert max(plan.num_tokens for plan in plans(engine)[1:]) > 4


def test_nothing_is_forced_where_logprobs_are_wanted() -> None:
    engine = make_engine(grammars=TinyCompiler())
    outcome = run(engine, ask("r", [3, 1], OBJECT, max_tokens=40, logprobs=1))["r"]
    assert outcome.tokens == constrained_continuation([3, 1], OBJECT, 40)[0]
    assert engine.stats()["spec_decode_num_draft_tokens_total"]["grammar"] == 0
    for message in outcome.messages:
        if isinstance(message, Tokens):
            assert message.logprobs is not None and len(message.logprobs) == len(message.token_ids)


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_forced_tokens_stay_within_max_tokens(max_tokens: int) -> None:
    for grammar in (OBJECT, CHOICE):
        engine = make_engine(grammars=TinyCompiler(), page_size=2)
        outcome = run(engine, ask("r", [9], grammar, max_tokens=max_tokens))["r"]
        assert outcome.finished is not None
        assert (outcome.tokens, outcome.finished.reason) == constrained_continuation([9], grammar, max_tokens)


@pytest.mark.parametrize("num_prompt", [2, 8, 9])  # less than a page of 4, whole pages, and one token more
def test_what_is_told_as_cached_of_a_prompt_is_of_the_prompt(num_prompt: int) -> None:
    """What a grammar forces is known before the prompt is admitted, and is looked up with it."""
    engine = make_engine(grammars=TinyCompiler(), page_size=4)
    prompt, opening = list(range(1, num_prompt + 1)), lark('start: "' + " the cab" * 6 + '-" /[a-c]/')
    for turn in ("first", "again"):
        outcome = run(engine, ask(turn, prompt, opening, max_tokens=60))[turn]
    told = next(message for message in outcome.messages if isinstance(message, Tokens))
    assert outcome.finished is not None and told.cache_report is not None
    assert told.cached_tokens == outcome.finished.cached_tokens == told.cache_report.cached_tokens == num_prompt
    assert told.cache_report.prompt_tokens == num_prompt and told.cache_report.reason == "complete"
    assert told.cache_report.cached_by_tier == {"device": num_prompt}
    stats = engine.stats()
    assert stats["prefix_cache_queries_total"] == 2 * num_prompt
    assert stats["prefix_cache_hits_total"] == {"device": num_prompt, "host": 0, "disk": 0}
    assert sum(stats["prefix_cache_misses_total"].values()) == 1, "the first one's"


def test_a_tenant_is_not_charged_for_a_prompt_that_is_cached_with_what_must_follow_it() -> None:
    engine = make_engine(grammars=TinyCompiler(), page_size=4)
    driver = Driver(engine)
    prompt = list(range(1, 9))
    run(engine, ask("first", prompt, OBJECT, max_tokens=30))
    driver.send(ask("again", prompt, OBJECT, max_tokens=30), generate("other", [50], max_tokens=40))
    driver.step()
    (request,) = [one for one in engine.scheduler.running if one.request_id == "again"]
    assert request.num_charged == request.num_prompt < request.num_planned
    driver.drain()


def test_forced_tokens_are_cached_like_any_others() -> None:
    engine = make_engine(grammars=TinyCompiler(), page_size=4)
    prompt = list(range(1, 10))
    answer = run(engine, ask("turn 1", prompt, OBJECT, max_tokens=30))["turn 1"].tokens
    outcome = run(engine, generate("turn 2", [*prompt, *answer, 5, 6]))["turn 2"]
    assert outcome.cached_tokens == (len(prompt) + len(answer) - 1) // 4 * 4
    assert outcome.tokens == continuation([*prompt, *answer, 5, 6], 8)


def test_a_long_chunk_of_forced_tokens_starves_nobody_who_generates() -> None:
    engine = make_engine(grammars=TinyCompiler(), max_num_batched_tokens=8)
    long = lark('start: /[a-c]/ "' + " the cab" * 12 + '-" /[a-c]/')
    driver = Driver(engine)
    driver.send(ask("r", [3, 4], long, max_tokens=60), generate("free", [1, 2], max_tokens=12))
    driver.step()
    for num in range(2, 12):
        driver.step()
        assert len(driver.outcomes["free"].tokens) == num, "a token in every step, though the other came first"
    assert max(plan.num_tokens for plan in plans(engine)) <= 8
    assert driver.drain()["r"].tokens == constrained_continuation([3, 4], long, 60)[0]


# ---------------------------------------------------------------- groups, preemption, aborts


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("held", [False, True])
def test_a_group_reads_its_prompt_once_and_each_follows_the_grammar(held: bool, depth: int) -> None:
    grammars = TinyCompiler(held=held)
    engine = make_engine(depth=depth, grammars=grammars, page_size=4)
    driver = Driver(engine)
    prompt = list(range(1, 12))
    driver.send(*(ask(f"r{i}", prompt, OBJECT, max_tokens=30, group="g", seed=i) for i in range(4)))
    for _ in range(4):
        driver.step()
    grammars.held = False
    outcomes = driver.drain()
    assert all(outcomes[f"r{i}"].tokens == constrained_continuation(prompt, OBJECT, 30)[0] for i in range(4))
    assert engine.stats()["prompt_tokens_computed_total"] == len(prompt)


def test_another_grammar_is_no_member_of_the_group() -> None:
    engine = make_engine(grammars=TinyCompiler())
    grammars = {"a": LETTERS, "b": OBJECT, "c": None, "d": LETTERS}
    prompt = [5, 6, 7]
    outcomes = run(
        engine,
        *(generate(name, prompt, grammar=g, group="g", ignore_eos=False) for name, g in grammars.items()),
    )
    for name, grammar in grammars.items():
        expected = continuation(prompt, 8) if grammar is None else constrained_continuation(prompt, grammar, 8)[0]
        assert outcomes[name].tokens == expected


def test_a_group_whose_grammar_is_refused_fails_as_a_whole() -> None:
    grammars = TinyCompiler(held=True)
    driver = Driver(make_engine(grammars=grammars))
    driver.send(*(ask(f"r{i}", [1, 2, 3], lark("start: x_"), group="g") for i in range(3)))
    driver.step()
    grammars.held = False
    outcomes = driver.drain()
    assert all(outcomes[f"r{i}"].failed is not None for i in range(3))


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_texts_go_on_where_they_were(depth: int) -> None:
    engine = make_engine(depth=depth, grammars=TinyCompiler(), num_pages=16, page_size=4, max_num_batched_tokens=16)
    grammars = [
        lark("start: /[a-d]{20,40}/"),
        lark(r'start: "{\"name\":\"" /[a-z]{9,20}/ "\",\"age\":" /[0-9]{9}/ "}"'),
    ]
    asked = {f"r{i}": ([i + 1, *range(2, 9)], grammars[i % 2]) for i in range(6)}
    outcomes = run(engine, *(ask(name, prompt, grammar, max_tokens=24) for name, (prompt, grammar) in asked.items()))
    assert engine.stats()["num_preemptions_total"]["recompute"] > 0
    for name, (prompt, grammar) in asked.items():
        assert outcomes[name].tokens == constrained_continuation(prompt, grammar, 24)[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("held", [True, False])
def test_aborts_in_every_state_leave_nothing(num_steps: int, depth: int, held: bool) -> None:
    grammars = TinyCompiler(held=held)
    engine = make_engine(depth=depth, grammars=grammars, max_num_seqs=3)
    driver = Driver(engine)
    names = [f"r{i}" for i in range(6)]
    driver.send(*(ask(name, range(1, 8), OBJECT, max_tokens=24, group="g" if name < "r3" else "") for name in names))
    for _ in range(num_steps):
        driver.step()
    driver.send(*(Abort(request_id=name) for name in names))
    driver.drain()
    assert engine.stats()["grammar_running"] == engine.stats()["grammar_waiting"] == 0


def test_with_the_compile_service_itself() -> None:
    engine = make_engine(grammars=CompileService(tiny_vocabulary, GrammarConfig()))
    asked = {f"r{i}": ([i + 1, 2, 3], GRAMMARS[i % 4]) for i in range(8)}
    outcomes = run(engine, *(ask(name, prompt, grammar) for name, (prompt, grammar) in asked.items()))
    for name, (prompt, grammar) in asked.items():
        assert outcomes[name].tokens == constrained_continuation(prompt, grammar, 8)[0]
    stats = engine.stats()
    assert stats["grammar_cache_entries"] == stats["grammar_compile_seconds"]["llguidance"]["count"] == 4
    engine.close()


def test_closing_the_engine_closes_the_compiler() -> None:
    grammars = TinyCompiler()
    make_engine(grammars=grammars).close()
    assert grammars.closed


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_matcher_that_gives_up_on_what_is_forced_fails_its_request_alone(depth: int, logprobs: int | None) -> None:
    """llguidance comes to a limit once a text is forced that never ends."""
    engine = make_engine(depth=depth, grammars=TinyCompiler())
    outcomes = run(
        engine,
        ask("endless", [1, 2, 3], lark('start: /[bc]/ rest\nrest: "a" rest'), max_tokens=40, logprobs=logprobs),
        ask("good", [2, 3], CHOICE, max_tokens=16),
        generate("free", [4, 5], max_tokens=8),
    )
    failed = outcomes["endless"].failed
    assert failed is not None and "cannot be followed any further" in failed.message
    assert outcomes["good"].tokens == constrained_continuation([2, 3], CHOICE, 16)[0]
    assert outcomes["free"].tokens == continuation([4, 5], 8)
    assert engine.stats()["grammar_running"] == 0

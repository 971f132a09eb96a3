"""What went wrong in other engines, provoked in this one. docs/failures.md has the whole list; its numbers stand at each test."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.radix.tier_factories import ManualIO
from tests.scheduler.factories import Driver, generate, make_engine, plans, run
from tests.stub import VOCAB_SIZE, continuation
from trunkline.messages import Abort
from trunkline.scheduler.engine import Engine
from trunkline.scheduler.request import Request
from trunkline.step import CopyKind

PAGE = 4


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def running(driver: Driver) -> list[str]:
    return [request.request_id for request in driver.engine.scheduler.running]


def chunks(engine: Engine, first: int = 0) -> list[int]:
    """Tokens of every request in every plan from `first` on."""
    return [int(n) for plan in plans(engine)[first:] for n in np.diff(plan.query_start)]


# ---------------------------------------------------------------- who owns a page


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_requests_that_share_pages_are_counted_right(depth: int) -> None:
    """4: the driver recomputes every counter from the tree after every step; here shared pages are given back and taken again."""
    engine = make_engine(num_pages=14, depth=depth)
    stem = prompt(1, 12)
    outcomes = run(engine, *(generate(f"r{i}", [*stem, i + 1], max_tokens=24) for i in range(4)))
    for i in range(4):
        assert outcomes[f"r{i}"].tokens == continuation([*stem, i + 1], 24)
    pages = engine.stats()["pages"]
    assert engine.scheduler.counters.preemptions > 0
    assert pages["free"] + pages["tree"] == 14 and pages["lease"] == pages["copy"] == 0


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_a_request_ends_while_the_step_after_its_last_is_in_flight(num_tokens: int) -> None:
    """5: that step has a page of its own for a token that nobody wants. It is given back once, when the step is done."""
    start = next([token] for token in range(1, VOCAB_SIZE) if len(set(continuation([token], 12))) == 12)
    text = continuation(start, 12)
    driver = Driver(make_engine(depth=1, num_speculative_tokens=0))
    driver.send(generate("r", start, max_tokens=20, stop_token_ids=(text[num_tokens - 1],)))
    while "r" not in driver.outcomes or driver.outcomes["r"].finished is None:
        driver.step()
    pages = driver.engine.stats()["pages"]
    assert pages["lease"] == 0 and pages["copy"] > 0 and driver.engine.has_work
    assert driver.drain()["r"].tokens == text[:num_tokens]
    pages = driver.engine.stats()["pages"]
    assert pages["copy"] == 0 and pages["free"] + pages["tree"] == 64


def test_a_request_is_preempted_while_its_last_token_is_in_flight() -> None:
    """9: the token is chosen once more, and the request ends once."""
    caught = 0
    for max_tokens in range(2, 16):
        engine = make_engine(num_pages=6, depth=1, policy="fcfs", num_speculative_tokens=0)
        preempt = engine.scheduler._preempt

        def watched(request: Request) -> None:
            nonlocal caught
            caught += request.num_in_flight > 0 and not request.wants_token
            preempt(request)  # noqa: B023  called in this very turn of the loop only

        engine.scheduler._preempt = watched  # type: ignore[method-assign]
        outcomes = run(engine, generate("a", [1] * 5, max_tokens=16), generate("b", [2] * 3, max_tokens=max_tokens))
        assert outcomes["b"].tokens == continuation([2] * 3, max_tokens)
        assert outcomes["a"].tokens == continuation([1] * 5, 16)
    assert caught


@pytest.mark.parametrize(
    "flags", [{"caching": False}, {"prompt_logprobs": 0}], ids=["no cache", "logprobs of the prompt"]
)
def test_progress_through_a_prompt_does_not_depend_on_what_is_shared(flags: dict[str, Any]) -> None:
    """14: each chunk begins where the one before ended, and no token is read twice."""
    engine = make_engine(max_num_batched_tokens=5, caching=flags.get("caching", True), num_speculative_tokens=0)
    tokens = prompt(1, 15)
    run(engine, generate("warm", tokens, max_tokens=1))
    first = len(plans(engine))
    scored = {} if "caching" in flags else flags
    outcome = run(engine, generate("r", tokens, max_tokens=1, **scored))["r"]
    assert outcome.tokens == continuation(tokens, 1)
    assert np.concatenate([plan.positions for plan in plans(engine)[first:]]).tolist() == [*range(15)]


# ---------------------------------------------------------------- the wrong keys and values


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pressure", [0, 20, 44])
def test_what_an_aborted_prompt_has_published_stays_right(pressure: int, depth: int) -> None:
    """17: aborted in its third chunk; then others need room; then somebody begins with the same tokens."""
    engine = make_engine(num_pages=12, max_num_batched_tokens=6, depth=depth)
    driver = Driver(engine)
    tokens = prompt(1, 20)
    driver.send(generate("aborted", tokens))
    while engine.scheduler.requests["aborted"].num_planned < 18:
        driver.step()
    driver.send(Abort(request_id="aborted"))
    if pressure:
        other = prompt(2, pressure)
        driver.send(generate("other", other, max_tokens=4))
        assert driver.drain()["other"].tokens == continuation(other, 4)
    again = [*tokens[:14], *prompt(3, 6)]
    driver.send(generate("again", again))
    outcome = driver.drain()["again"]
    assert outcome.tokens == continuation(again, 8)
    assert (outcome.cached_tokens > 0) == (pressure < 44)


def test_aborted_while_its_pages_are_being_loaded() -> None:
    """22: the pages that a copy goes to are nobody's until the step is done that makes it."""
    driver = Driver(make_engine(num_pages=12, host_slots=64, depth=1))
    old, other = prompt(1, 20), prompt(2, 40)
    for name, tokens in (("old", old), ("other", other)):
        driver.send(generate(name, tokens))
        driver.drain()
    driver.send(generate("aborted", old))
    in_flight = driver.engine.worker.in_flight  # type: ignore[attr-defined]
    while not any(copy.kind is CopyKind.LOAD for plan in in_flight for copy in plan.copies):
        driver.step()
    driver.send(Abort(request_id="aborted"))
    assert driver.engine.stats()["pages"]["copy"] >= 4
    for name, tokens in (("other again", other), ("old again", old)):
        driver.send(generate(name, tokens))
        assert driver.drain()[name].tokens == continuation(tokens, 8)
    assert driver.outcomes["old again"].cached_tokens == 16


def test_nothing_is_found_after_one_request_has_taken_every_page() -> None:
    """26: after much traffic, too. What is found is either there or not; nothing is left of it in between."""
    engine = make_engine(num_pages=16)
    first = prompt(0, 20)
    for i in range(60):
        tokens = prompt(i, 20)
        assert run(engine, generate("r", tokens))["r"].tokens == continuation(tokens, 8)
    huge = prompt(99, 16 * PAGE - 2)
    assert run(engine, generate("huge", huge, max_tokens=2))["huge"].tokens == continuation(huge, 2)
    outcome = run(engine, generate("again", first))["again"]
    assert outcome.cached_tokens == 0
    assert outcome.tokens == continuation(first, 8)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_output", range(1, 10))
def test_the_next_turn_finds_all_of_an_answer_but_the_token_that_was_never_read(num_output: int, depth: int) -> None:
    """34: where the answer ends with a page, its last page isn't whole, and neither is one shared less than was computed."""
    engine = make_engine(depth=depth)
    question = prompt(1, 10)
    answer = run(engine, generate("turn 1", question, max_tokens=num_output))["turn 1"].tokens
    turn = [*question, *answer, *prompt(2, 7)]
    outcome = run(engine, generate("turn 2", turn))["turn 2"]
    assert outcome.cached_tokens == (10 + num_output - 1) // PAGE * PAGE
    assert outcome.tokens == continuation(turn, 8)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_storm_of_cancellations_and_retries_changes_no_text(depth: int) -> None:
    """35: 20 at once in a pool that is too small, every fourth cancelled while it generates and sent again, three times."""
    engine = make_engine(num_pages=40, depth=depth, max_num_batched_tokens=24)
    driver, stem = Driver(engine), prompt(1, 9)
    prompts = {f"r{i}": [*stem[: i % 10], *prompt(i, 1 + i % 7)] for i in range(20)}
    for name, tokens in prompts.items():
        driver.send(generate(name, tokens, max_tokens=14))
    for attempt in range(3):
        while not sum(request.num_output > 2 for request in engine.scheduler.running) > 3:
            driver.step()
        for name in [name for name in running(driver) if name in prompts][::4]:
            driver.send(Abort(request_id=name))
            again = f"{name} again {attempt}"
            prompts[again] = prompts.pop(name)
            driver.send(generate(again, prompts[again], max_tokens=14))
        driver.step()
    driver.drain()
    assert engine.scheduler.counters.preemptions > 0
    assert len(prompts) == 20 and sum("again" in name for name in prompts) >= 3
    for name, tokens in prompts.items():
        assert driver.outcomes[name].tokens == continuation(tokens, 14), name


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize("num_tokens", range(33, 46))
def test_of_a_warm_prompt_longer_than_a_chunk_only_the_rest_is_planned(num_tokens: int) -> None:
    """38 and 42: one chunk, never an empty one, and no more than a page and what is new."""
    engine = make_engine(max_num_batched_tokens=16, num_speculative_tokens=0)
    tokens = prompt(1, 45)
    run(engine, generate("cold", tokens[:40], max_tokens=1))
    assert chunks(engine) == [16, 16, 8]
    first = len(plans(engine))
    outcome = run(engine, generate("warm", tokens[:num_tokens], max_tokens=2))["warm"]
    assert outcome.tokens == continuation(tokens[:num_tokens], 2)
    assert chunks(engine, first) == [num_tokens - min(40, (num_tokens - 1) // PAGE * PAGE), 1]


@pytest.mark.parametrize("num_tokens", range(6 * PAGE, 8 * PAGE))
def test_whatever_is_accepted_is_served_however_near_to_the_pools_size(num_tokens: int) -> None:
    """44: beside another that runs and is cancelled; cancelled itself and sent again; to the last token there is room for."""
    driver = Driver(make_engine(num_pages=8))
    tokens = prompt(1, num_tokens)
    driver.send(generate("other", prompt(2, 6), max_tokens=20))
    driver.step()
    driver.send(generate("cancelled", tokens, max_tokens=None), generate("r", tokens, max_tokens=None))
    driver.step()
    driver.send(Abort(request_id="other"))
    driver.step()
    driver.send(Abort(request_id="cancelled"))
    outcome = driver.drain(max_steps=50)["r"]
    assert outcome.tokens == continuation(tokens, 8 * PAGE - num_tokens)
    driver.send(generate("too long", prompt(1, 8 * PAGE)))
    assert driver.outcomes["too long"].failed is not None


# ---------------------------------------------------------------- who waits


def test_who_waits_for_the_disk_takes_no_place(tmp_path: Path) -> None:
    """46: of one place in all."""
    old, new = prompt(1, 20), prompt(2, 20)
    engine = make_engine(host_slots=64, disk_cache_dir=tmp_path)
    for _ in range(2):
        run(engine, generate("r", old))
    engine.close()
    io = ManualIO()
    driver = Driver(make_engine(host_slots=64, disk_cache_dir=tmp_path, background=io, max_num_seqs=1))
    driver.send(generate("old", old), generate("new", new))
    while "new" not in driver.outcomes or driver.outcomes["new"].finished is None:
        driver.step()
        assert running(driver) in (["new"], [])
    io.run_all()
    assert driver.drain()["old"].cached_tokens == 16
    assert driver.outcomes["old"].tokens == continuation(old, 8)
    driver.engine.close()


def test_twins_that_wait_for_their_leader_take_no_places() -> None:
    """46: three of them, and two places."""
    driver = Driver(make_engine(max_num_batched_tokens=8, max_num_seqs=2))
    twin, other = prompt(1, 21), prompt(2, 3)
    driver.send(*(generate(f"twin {i}", twin) for i in range(4)), generate("other", other))
    while not driver.engine.scheduler.requests["other"].num_planned:
        driver.step()
    assert running(driver) == ["twin 0", "other"]
    outcomes = driver.drain()
    assert outcomes["other"].tokens == continuation(other, 8)
    assert [outcomes[f"twin {i}"].cached_tokens for i in range(4)] == [0, 20, 20, 20]


def test_the_most_urgent_waits_for_a_place_and_for_nobody_else() -> None:
    """57: when all places are taken, nobody who runs is stopped for it; but the next place is its own."""
    driver = Driver(make_engine(policy="priority", max_num_seqs=1))
    driver.send(generate("running", [1], max_tokens=4, priority=5))
    driver.step()
    driver.send(*(generate(f"low {i}", [2, i], priority=5) for i in range(3)), generate("high", [3], priority=0))
    while "running" in running(driver):
        driver.step()
    driver.step()
    assert running(driver) == ["high"]
    driver.drain()


@pytest.mark.parametrize("depth", [0, 1])
def test_who_comes_right_after_the_last_word_finds_everything(depth: int) -> None:
    """57: pages are published with the step that computed them, not some time later."""
    driver = Driver(make_engine(depth=depth))
    tokens = prompt(1, 21)
    driver.send(generate("first", tokens))
    while "first" not in driver.outcomes or driver.outcomes["first"].finished is None:
        driver.step()
    driver.send(generate("next", [*tokens, *driver.outcomes["first"].tokens, 5]))
    assert driver.drain()["next"].cached_tokens == 28

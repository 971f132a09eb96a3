"""n > 1: a prompt is read once, its pages are forked, and every choice is what it would be alone."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.factories import Driver, generate, make_engine, plans, run
from tests.stub import StubWorker, continuation, next_token
from trunkline.messages import Abort, Generate, Tokens
from trunkline.scheduler.engine import Engine
from trunkline.scheduler.request import Request, State
from trunkline.step import CopyKind, Plan, StepResult

PROMPT = [7 * i % 90 + 1 for i in range(100)]


class Seeded(StubWorker):
    """A StubWorker whose every token also depends on the seed and the position of its row: choices differ, as if sampled."""

    def _run(self, plan: Plan) -> StepResult:
        result = super()._run(plan)
        for index, row in enumerate(plan.rows):
            if row.sampling is not None:
                result.token_ids[index] = seeded(int(result.token_ids[index]), row.seed, row.position)
        return result


def seeded(token_id: int, seed: int, position: int) -> int:
    return next_token([token_id, seed, position])


def alone(prompt: list[int], seed: int, max_tokens: int) -> list[int]:
    """What a Seeded worker says, without pages."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(seeded(next_token(tokens), seed, len(tokens)))
    return tokens[len(prompt) :]


def make_seeded(**flags: Any) -> Engine:
    engine = make_engine(**flags)
    stub = engine.worker
    assert isinstance(stub, StubWorker)
    engine.worker = Seeded(
        num_pages=stub.num_pages, page_size=stub.page_size, depth=stub.depth, poison_token=stub.poison_token
    )
    return engine


def choices(n: int, prompt: list[int] | None = None, **sampling: Any) -> list[Generate]:
    """A request with n choices, as the API process sends it."""
    fields: dict[str, Any] = {"max_tokens": 8} | sampling
    return [generate(f"g{i}", PROMPT if prompt is None else prompt, group="g", seed=i, **fields) for i in range(n)]


def first_steps(driver: Driver, names: list[str]) -> set[int]:
    """Steps in which the first tokens of these requests arrive, while it runs until idle."""
    steps: set[int] = set()
    seen: set[str] = set()
    while driver.engine.has_work:
        driver.step()
        arrived = {name for name in names if name in driver.outcomes and driver.outcomes[name].tokens}
        if arrived - seen:
            steps.add(driver.engine.scheduler.last_step)
        seen |= arrived
    return steps


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [512, 30])
@pytest.mark.parametrize("num_prompt", [100, 96, 3])
def test_eight_choices_read_the_prompt_once(num_prompt: int, chunk: int, depth: int) -> None:
    prompt = PROMPT[:num_prompt]
    engine = make_seeded(num_pages=128, page_size=16, max_num_batched_tokens=chunk, depth=depth)
    driver = Driver(engine)
    driver.send(*choices(8, prompt))
    assert [request.state for request in engine.scheduler.requests.values()] == [State.WAITING] + [State.FOLLOWING] * 7
    assert engine.stats()["waiting"] == 1
    steps = first_steps(driver, [f"g{i}" for i in range(8)])
    assert len(steps) == 1, "all first tokens come from one forward pass"
    assert engine.stats()["prompt_tokens_computed_total"] == num_prompt
    for i in range(8):
        outcome = driver.outcomes[f"g{i}"]
        assert outcome.tokens == alone(prompt, i, 8)
        assert outcome.finished is not None and outcome.finished.prompt_tokens == num_prompt
    copies = [copy for plan in plans(engine) for copy in plan.copies]
    assert len(copies) == (7 if num_prompt % 16 else 0)
    assert all(copy.kind is CopyKind.FORK and len(copy.source) == len(copy.target) == 1 for copy in copies)


def test_the_same_without_a_group() -> None:
    together = run(make_seeded(num_pages=128, page_size=16), *choices(4))
    for i in range(4):
        lone = run(make_seeded(num_pages=128, page_size=16), generate("r", PROMPT, seed=i))["r"]
        assert together[f"g{i}"].tokens == lone.tokens


def test_what_the_leader_found_in_the_cache_all_report() -> None:
    engine = make_seeded(num_pages=128, page_size=16)
    run(engine, generate("before", PROMPT, max_tokens=1))
    outcomes = run(engine, *choices(3))
    assert [outcomes[f"g{i}"].cached_tokens for i in range(3)] == [96, 96, 96]
    assert engine.stats()["prompt_tokens_computed_total"] == 100 + 4


def test_choices_of_one_token_need_no_pages() -> None:
    engine = make_seeded(num_pages=128, page_size=16)
    outcomes = run(engine, *choices(8, max_tokens=1))
    assert [outcomes[f"g{i}"].tokens for i in range(8)] == [alone(PROMPT, i, 1) for i in range(8)]
    assert len(plans(engine)) == 1


def test_logprobs_and_first_token_times_of_every_choice() -> None:
    engine = make_seeded(num_pages=128, page_size=16)
    for outcome in run(engine, *choices(3, logprobs=1)).values():
        first, *later = (message for message in outcome.messages if isinstance(message, Tokens))
        assert first.queue_seconds is not None and first.prefill_seconds is not None
        assert all(message.queue_seconds is None for message in later)
        assert all(message.logprobs is not None and len(message.logprobs) == 1 for message in (first, *later))


def test_more_choices_than_places() -> None:
    engine = make_seeded(num_pages=128, page_size=16, max_num_seqs=3)
    driver = Driver(engine)
    driver.send(*choices(8))
    assert len(first_steps(driver, [f"g{i}" for i in range(8)])) == 2, "the leader and three, the next leader and three"
    assert [driver.outcomes[f"g{i}"].tokens for i in range(8)] == [alone(PROMPT, i, 8) for i in range(8)]
    assert max(plan.num_requests for plan in plans(engine)) == 3
    assert engine.stats()["prompt_tokens_computed_total"] <= 100 + 5 * 4, "those that wait find its whole pages again"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_has_a_row_for_each_token_and_one_for_each_place(depth: int) -> None:
    """However many groups of however many choices read their prompts in it: logits take a lot of memory."""
    engine = make_seeded(num_pages=256, page_size=16, max_num_seqs=4, max_num_batched_tokens=64, depth=depth)
    prompts = {group: [group, 2, 3] for group in (11, 12, 13)}
    outcomes = run(
        engine,
        *(
            generate(f"{group}.{i}", prompt, group=str(group), seed=i, max_tokens=3)
            for group, prompt in prompts.items()
            for i in range(6)
        ),
    )
    assert all(len(plan.rows) <= plan.num_tokens + 4 for plan in plans(engine))
    for group, prompt in prompts.items():
        assert [outcomes[f"{group}.{i}"].tokens for i in range(6)] == [alone(prompt, i, 3) for i in range(6)]


def test_more_choices_than_pages() -> None:
    engine = make_seeded(num_pages=10, page_size=16)
    outcomes = run(engine, *choices(8, max_tokens=30))
    assert [outcomes[f"g{i}"].tokens for i in range(8)] == [alone(PROMPT, i, 30) for i in range(8)]


@pytest.mark.parametrize(("caching", "sampling"), [(False, {}), (True, {"prompt_logprobs": 0})])
def test_without_cache_or_with_prompt_logprobs_each_reads_for_itself(caching: bool, sampling: dict[str, Any]) -> None:
    engine = make_seeded(num_pages=128, page_size=16, caching=caching)
    outcomes = run(engine, *choices(3, **sampling))
    assert [outcomes[f"g{i}"].tokens for i in range(3)] == [alone(PROMPT, i, 8) for i in range(3)]
    assert engine.stats()["prompt_tokens_computed_total"] == 300
    assert not any(plan.copies for plan in plans(engine))


def test_a_group_is_believed_only_as_far_as_prompts_and_namespaces_are_equal() -> None:
    engine = make_seeded(num_pages=128, page_size=16)
    outcomes = run(
        engine,
        generate("a", PROMPT, group="g"),
        generate("b", [*PROMPT[:-1], 5], group="g"),
        generate("c", PROMPT, group="g", salt="other"),
        generate("d", PROMPT, group="h"),
    )
    assert outcomes["b"].tokens == alone([*PROMPT[:-1], 5], 0, 8)
    assert outcomes["c"].tokens == outcomes["a"].tokens == outcomes["d"].tokens == alone(PROMPT, 0, 8)
    assert outcomes["c"].cached_tokens == 0
    assert not any(plan.copies for plan in plans(engine))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 5, 6])
@pytest.mark.parametrize("aborted", ["g0", "g1", "g2"])
def test_any_of_them_may_be_aborted_at_any_time(aborted: str, num_steps: int, depth: int) -> None:
    engine = make_seeded(num_pages=128, page_size=16, max_num_batched_tokens=30, depth=depth)
    driver = Driver(engine)
    driver.send(*choices(3))
    for _ in range(num_steps):
        driver.step()
    driver.send(Abort(request_id=aborted))
    driver.drain()
    for i in range(3):
        if f"g{i}" != aborted:
            assert driver.outcomes[f"g{i}"].tokens == alone(PROMPT, i, 8)
    lost = 30 * (depth + 1) if aborted == "g0" else 0  # what was in flight
    assert engine.stats()["prompt_tokens_computed_total"] <= 100 + lost


def test_a_leader_that_is_preempted_leads_on() -> None:
    engine = make_seeded(num_pages=10, page_size=16, max_num_batched_tokens=30, policy="fcfs")
    driver = Driver(engine)
    driver.send(generate("before", [5] * 31, seed=9, max_tokens=60))
    driver.step()
    driver.send(*choices(3))
    driver.step()
    leader = engine.scheduler.requests["g0"]
    assert leader in engine.scheduler.running and leader.num_computed < 100
    engine.scheduler._preempt(leader)
    assert leader in engine.scheduler.waiting and len(leader.followers) == 2
    driver.drain()
    assert [driver.outcomes[f"g{i}"].tokens for i in range(3)] == [alone(PROMPT, i, 8) for i in range(3)]
    assert driver.outcomes["before"].tokens == alone([5] * 31, 9, 60)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_that_fails_fails_for_every_choice(depth: int) -> None:
    engine = make_seeded(num_pages=128, page_size=16, poison_token=96, depth=depth)
    outcomes = run(engine, *choices(4, [5, 6, 96, 7]))
    for i in range(4):
        failed = outcomes[f"g{i}"].failed
        assert failed is not None and failed.message == "Token 96 was read."
    assert len(plans(engine)) <= 1 + depth, "it is read once for all of them"
    assert engine.stats()["pages"]["tree"] == 0


def test_one_that_joins_when_the_prompt_is_nearly_read() -> None:
    engine = make_seeded(num_pages=128, page_size=16, depth=1)
    driver = Driver(engine)
    g0, g1, g2 = choices(3)
    driver.send(g0)
    driver.step()  # its only chunk is in flight: too late for a row of that step
    driver.send(g1, g2)
    driver.drain()
    assert [driver.outcomes[f"g{i}"].tokens for i in range(3)] == [alone(PROMPT, i, 8) for i in range(3)]
    assert engine.stats()["prompt_tokens_computed_total"] == 100 + 4, "one more reads what is no whole page"


def test_a_lost_step_takes_along_those_whose_pages_it_was_to_copy() -> None:
    engine = make_seeded(num_pages=128, page_size=16)
    driver = Driver(engine)
    driver.send(*choices(3))
    driver.step()
    submit = engine.worker.submit

    def broken(plan: Plan) -> object:
        assert plan.copies
        raise MemoryError("no room")

    engine.worker.submit = broken  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        driver.step()
    engine.worker.submit = submit  # type: ignore[method-assign]
    engine.scheduler.check()
    assert not engine.scheduler.requests
    assert run(engine, generate("r", PROMPT, seed=1))["r"].tokens == alone(PROMPT, 1, 8)


def test_a_lost_step_takes_along_even_those_that_had_no_part_in_it_but_for_the_copy() -> None:
    engine = make_seeded(num_pages=64, page_size=16, max_num_batched_tokens=2)
    driver = Driver(engine)
    driver.send(*choices(4, [5, 6, 7]))
    driver.step()
    driver.step()
    assert len(engine.scheduler.running) == 4, "two of them have no place in the next step"
    submit = engine.worker.submit

    def broken(plan: Plan) -> object:
        assert plan.num_requests == 2 and len(plan.copies) == 3
        raise MemoryError("no room")

    engine.worker.submit = broken  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        driver.step()
    engine.worker.submit = submit  # type: ignore[method-assign]
    assert not engine.scheduler.running
    driver.drain()
    assert run(engine, generate("r", [5, 6, 7], seed=1))["r"].tokens == alone([5, 6, 7], 1, 8)


def test_a_page_whose_owner_has_ended_is_copied_before_it_is_written_again() -> None:
    """The leader ends with its first token; its page is free while the copy of it is still to be made."""
    engine = make_seeded(num_pages=12, page_size=16, max_num_seqs=3)
    driver = Driver(engine)
    leader, *followers = choices(2)
    short = generate("g0", PROMPT, group="g", seed=0, max_tokens=1)
    assert leader.request_id == short.request_id
    driver.send(short, *followers)
    driver.step()
    assert driver.outcomes["g0"].finished is not None
    driver.send(generate("next", [3] * 40, seed=4))  # takes the free pages, in the very plan that copies
    driver.drain()
    assert driver.outcomes["g1"].tokens == alone(PROMPT, 1, 8)
    assert driver.outcomes["next"].tokens == alone([3] * 40, 4, 8)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_random_groups(data: st.DataObject) -> None:
    """Groups, lone requests, aborts and steps in any order, with drafts that are right now and then: everyone gets their tokens."""
    engine = make_seeded(
        num_pages=data.draw(st.integers(8, 40)),
        page_size=data.draw(st.sampled_from([1, 2, 4])),
        depth=data.draw(st.integers(0, 1)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.integers(6, 40)),
    )
    rng = random.Random(data.draw(st.integers(0, 9)))

    def find(request: Request, length: int) -> bytes:
        right = alone(request.token_ids(0, request.num_tokens).tolist(), request.seed, length)
        return np.array([token if rng.random() < 0.7 else 3 for token in right], "<i4").tobytes()

    engine.scheduler.drafter.sources = {"tree": find}
    driver, longest = Driver(engine), engine.scheduler.max_tokens_per_request
    wanted: dict[str, tuple[list[int], int, int]] = {}
    aborted: set[str] = set()
    for i in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["group", "step", "step", "step", "abort"]))
        if action == "group":
            prompt = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=longest - 1))
            max_tokens = data.draw(st.integers(1, 9))
            for choice in range(data.draw(st.integers(1, 4))):
                name = f"r{i}.{choice}"
                wanted[name] = prompt, choice, max_tokens
                driver.send(generate(name, prompt, group=f"r{i}", seed=choice, max_tokens=max_tokens))
        elif action == "abort" and wanted:
            aborted.add(name := data.draw(st.sampled_from(sorted(wanted))))
            driver.send(Abort(request_id=name))
        else:
            driver.step()
    driver.drain()
    for name, (prompt, seed, max_tokens) in wanted.items():
        expected = alone(prompt, seed, min(max_tokens, longest - len(prompt)))
        outcome = driver.outcomes.get(name)
        if name in aborted:
            assert outcome is None or outcome.tokens == expected[: len(outcome.tokens)]
        else:
            assert outcome is not None and outcome.finished is not None, name
            assert outcome.tokens == expected, name


def test_seeds_make_a_difference_here() -> None:
    assert alone(PROMPT, 0, 8) != alone(PROMPT, 1, 8)
    assert next_token(PROMPT) == continuation(PROMPT, 1)[0]
    assert len(np.unique([alone(PROMPT, i, 1) for i in range(8)])) > 2

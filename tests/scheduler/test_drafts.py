"""Drafts: where they come from, when they are tried, and that they never change what is said."""

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.scheduler.factories import EOS, Driver, generate, make_engine, plans, plant_drafts, run
from tests.stub import VOCAB_SIZE, StubWorker, continuation
from trunkline.messages import Abort, Tokens
from trunkline.radix.cache import PrefixCache
from trunkline.radix.tree import Node
from trunkline.sampling import SamplingParams
from trunkline.scheduler.drafts import MAX_UNALIGNED, Draft, from_own_tokens
from trunkline.scheduler.engine import Engine
from trunkline.scheduler.grouping import Grouping
from trunkline.scheduler.planner import PlanBuilder
from trunkline.scheduler.request import Request

Find = Callable[[Request, int], bytes]


def request_of(tokens: list[int]) -> Request:
    prompt = np.array(tokens, "<i4").tobytes()
    return Request("r", prompt=prompt, sampling=SamplingParams(seed=0), arrival=0.0, order=0)


def own(tokens: list[int], length: int) -> list[int]:
    return np.frombuffer(from_own_tokens(request_of(tokens), length), "<i4").tolist()


# ---------------------------------------------------------------- the request's own tokens


def test_what_followed_the_same_tokens_before() -> None:
    assert own([5, 6, 7, 8, 9, 10, 1, 5, 6, 7], 2) == [8, 9]


def test_the_longest_match_wins_and_of_equals_the_latest() -> None:
    assert own([1, 2, 3, 4, 70, 9, 3, 4, 80, 1, 2, 3, 4], 1) == [70]
    assert own([3, 4, 70, 9, 3, 4, 80, 1, 3, 4], 1) == [80]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert own([1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert own([9, 4, 4, 4], 3) == [4, 4, 4]


def test_one_token_alone_is_no_match() -> None:
    assert own([5, 6, 7, 5], 4) == []
    assert own([5], 4) == []
    assert own([5, 5], 4) == []


def test_a_match_begins_where_a_token_begins() -> None:
    # As bytes, the last two tokens stand inside the first three, one byte late.
    assert own([1 << 8, 2 << 8, 3 << 8, 9, 1, 2], 1) == []
    # The search gives up rather than look at every place where bytes, but no tokens, are equal.
    decoys = [1 << 8, 2 << 8, 9 << 8] * MAX_UNALIGNED
    assert own([1, 2, 77, *decoys[3:], 1, 2], 1) == [77]
    assert own([1, 2, 77, *decoys, 1, 2], 1) == []


def test_against_a_naive_search() -> None:
    rng = random.Random(5)
    for _ in range(300):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        expected: list[int] = []
        for num in (4, 3, 2):
            places = [at for at in range(len(tokens) - num) if tokens[at : at + num] == tokens[-num:]]
            if places and not expected:
                follows = tokens[places[-1] + num :]
                expected = (follows * 6)[:6]
        assert own(tokens, 6) == expected, tokens


# ---------------------------------------------------------------- verification


@pytest.mark.parametrize("right", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("depth", [0, 1])
def test_text_is_the_same_however_often_drafts_are_right(right: float, depth: int) -> None:
    engine = make_engine(depth=depth, num_pages=40, max_num_batched_tokens=24)
    plant_drafts(engine, right)
    prompts = {f"r{i}": [i + 1, *range(1, 3 * i)] for i in range(8)}
    outcomes = run(engine, *(generate(name, prompt, max_tokens=30) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert outcomes[name].tokens == continuation(prompt, 30), name
        finished = outcomes[name].finished
        assert finished is not None and (finished.reason, finished.completion_tokens) == ("length", 30)
    stats = engine.stats()
    assert stats["generation_tokens_total"] == 8 * 30
    if depth == 0:
        proposed = stats["spec_decode_num_draft_tokens_total"]["tree"]
        accepted = stats["spec_decode_num_accepted_tokens_total"]["tree"]
        assert proposed == sum(drafted_rows(engine)) and accepted <= proposed
        assert (accepted == proposed > 0) if right == 1 else (right > 0 or accepted < 0.1 * proposed)


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_with_steps_in_flight_drafts_are_tried_by_who_sat_one_out(
    right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(depth=1)
    budgets = itertools.cycle([2, 24])
    monkeypatch.setattr(engine.scheduler, "max_step_tokens", lambda: next(budgets))
    plant_drafts(engine, right)
    outcomes = run(engine, *(generate(f"r{i}", [i + 1, 2], max_tokens=30) for i in range(3)))
    assert [outcomes[f"r{i}"].tokens for i in range(3)] == [continuation([i + 1, 2], 30) for i in range(3)]
    assert sum(drafted_rows(engine)) > 0


def drafted_rows(engine: Engine) -> list[int]:
    """Drafts of each plan: rows that choose, beyond one for each request that gets a token."""
    choosing = [[row.request for row in plan.rows if row.sampling is not None] for plan in plans(engine)]
    return [len(requests) - len(set(requests)) for requests in choosing]


def test_right_drafts_arrive_together_and_save_steps() -> None:
    engine = make_engine(num_speculative_tokens=4)
    plant_drafts(engine, 1.0)
    outcome = run(engine, generate("r", [1, 2, 3], max_tokens=31, logprobs=1))["r"]
    assert outcome.tokens == continuation([1, 2, 3], 31)
    sizes = [len(message.token_ids) for message in outcome.messages if isinstance(message, Tokens)]
    assert max(sizes) == 5 and sum(sizes) == 31 and len(plans(engine)) == len(sizes) < 10
    for message in outcome.messages:
        if isinstance(message, Tokens):
            assert message.logprobs is not None
            assert [entry.token_ids[0] for entry in message.logprobs] == message.token_ids


def test_drafts_are_off_at_zero() -> None:
    engine = make_engine(num_speculative_tokens=0)
    plant_drafts(engine, 1.0)
    run(engine, generate("r", [1, 2, 3], max_tokens=12))
    assert len(plans(engine)) == 12 and sum(drafted_rows(engine)) == 0


def test_the_end_of_text_in_the_middle_of_right_drafts_is_the_last_token() -> None:
    prompt = next(
        [token] for token in range(1, VOCAB_SIZE) if 4 < len(continuation([token], 40, eos_token_id=EOS)) < 40
    )
    engine = make_engine()
    plant_drafts(engine, 1.0)
    engine.scheduler.drafter.priors["tree"] = 0.9  # many drafts from the start
    outcome = run(engine, generate("r", prompt, max_tokens=40, ignore_eos=False))["r"]
    assert outcome.tokens == continuation(prompt, 40, eos_token_id=EOS)
    assert outcome.finished is not None
    assert (outcome.finished.reason, outcome.finished.stop_token_id) == ("stop", EOS)
    assert outcome.finished.completion_tokens == len(outcome.tokens)
    last = plans(engine)[-1]
    assert EOS not in last.token_ids[:-1], "nothing is drafted after the end"


def test_stop_ids_and_min_tokens_hold_inside_drafts() -> None:
    prompt = [3, 1, 4]
    text = continuation(prompt, 20)
    stop, early = text[9], text[4]
    engine = make_engine()
    plant_drafts(engine, 1.0)
    outcome = run(engine, generate("r", prompt, max_tokens=20, stop_token_ids=(stop, early), min_tokens=6))["r"]
    expected = text[: 6 + next(i for i, token in enumerate(text[5:]) if token in (stop, early))]
    assert outcome.tokens == expected
    rows = {row.position: row.banned for plan in plans(engine) for row in plan.rows if row.sampling is not None}
    assert all(bool(rows[position]) == (position - len(prompt) < 6) for position in rows)


def test_penalties_see_the_drafts_before_them() -> None:
    engine = make_engine()
    plant_drafts(engine, 1.0)
    prompt = [3, 1, 4]
    run(engine, generate("r", prompt, max_tokens=20, presence_penalty=1.0))
    text = continuation(prompt, 20)
    checked = 0
    for plan in plans(engine):
        for row in plan.rows:
            assert row.output is not None and row.prompt is not None
            assert row.prompt.tolist() == prompt
            assert row.output.tolist() == text[: row.position - len(prompt)]
            checked += 1
    assert checked == 20


def test_drafts_stay_within_max_tokens_the_context_and_the_budget() -> None:
    engine = make_engine(max_model_len=30, max_num_batched_tokens=6)
    plant_drafts(engine, 1.0)
    outcomes = run(
        engine,
        generate("short", [1, 2, 3], max_tokens=7),
        generate("long", [4, 5, 6], max_tokens=None),
    )
    assert outcomes["short"].tokens == continuation([1, 2, 3], 7)
    assert outcomes["long"].tokens == continuation([4, 5, 6], 27)
    assert max(len(plan.token_ids) for plan in plans(engine)) <= 6
    assert max(plan.positions.max() for plan in plans(engine)) == 28, "the last token is never computed"


def test_a_row_that_fails_after_a_wrong_draft_is_nobodys_business() -> None:
    engine = make_engine(poison_token=96)
    engine.scheduler.drafter.sources = {"tree": lambda request, length: np.array([96] * length, "<i4").tobytes()}
    prompt = next([token] for token in range(1, 90) if 96 not in continuation([token], 8))
    outcome = run(engine, generate("r", prompt))["r"]
    assert outcome.tokens == continuation(prompt, 8) and outcome.finished is not None
    assert engine.stats()["spec_decode_num_draft_tokens_total"]["tree"] > 0


def test_a_row_that_fails_after_right_drafts_fails_the_request_after_its_good_tokens() -> None:
    prompt = next([token] for token in range(1, 90) if 96 in continuation([token], 30)[6:])
    text = continuation(prompt, 30)
    engine = make_engine(poison_token=96)
    plant_drafts(engine, 1.0)
    outcome = run(engine, generate("r", prompt, max_tokens=30))["r"]
    assert outcome.tokens == text[: text.index(96) + 1]
    assert outcome.failed is not None and outcome.failed.message == "Token 96 was read."
    assert engine.stats()["pages"]["lease"] == 0


@pytest.mark.parametrize(("num_free", "num_drafts"), [(0, 1), (1, 3), (2, 5), (3, 7), (9, 8)])
def test_drafts_take_free_pages_only(num_free: int, num_drafts: int) -> None:
    engine = make_engine(num_pages=16, page_size=2)
    run(engine, generate("before", range(40, 70), max_tokens=1))  # 15 pages of the tree
    scheduler = engine.scheduler
    request = request_of([1, 2, 3])
    request.lease = scheduler.cache.admit(scheduler.cache.match(request.namespace, bytes(request.tokens), 3), 2)
    evictable = scheduler.cache.stats().tree_evictable
    scheduler.cache.evict(num_free - scheduler.cache.pool.num_free)
    plant_drafts(engine, 1.0)
    scheduler.drafter.priors["tree"] = 0.9
    before = scheduler.cache.stats()
    assert before.free == num_free and (before.tree_evictable > 0 or num_free == 9) and evictable
    draft = scheduler.drafter.propose(request, 100)
    after = scheduler.cache.stats()
    assert draft is not None and len(draft.token_ids) == num_drafts
    assert after.tree_evictable == before.tree_evictable
    assert request.lease is not None and 3 + num_drafts <= request.lease.num_pages * 2


def test_preempted_and_aborted_with_drafts_in_flight() -> None:
    for depth in (0, 1):
        engine = make_engine(num_pages=10, page_size=4, depth=depth)
        plant_drafts(engine, 0.7)
        driver = Driver(engine)
        driver.send(*(generate(name, [ord(name) % 50] * 8, max_tokens=20) for name in "abc"))
        for _ in range(6):
            driver.step()
        driver.send(Abort(request_id="a"))
        driver.drain()
        for name in "bc":
            assert driver.outcomes[name].tokens == continuation([ord(name) % 50] * 8, 20)
        assert engine.scheduler.counters.preemptions > 0


def test_a_preempted_request_has_no_drafts_in_flight() -> None:
    request = request_of([1, 2, 3])
    request.num_planned, request.num_in_flight, request.num_drafts = 3, 1, 2
    assert request.num_to_plan == 0
    request.reset_progress()
    assert request.num_to_plan == 3


# ---------------------------------------------------------------- when they pay


def questions(num: int) -> list[list[int]]:
    """One document each of four, and a question."""
    rng = random.Random(1)
    documents = [[rng.randrange(1, VOCAB_SIZE) for _ in range(40)] for _ in range(4)]
    return [documents[i % 4] + [rng.randrange(1, VOCAB_SIZE) for _ in range(7)] for i in range(num)]


@pytest.mark.parametrize("at_a_time", [1, 8])
def test_the_same_questions_again_take_less_than_half_the_steps(at_a_time: int) -> None:
    engine = make_engine(num_pages=512, page_size=16, max_num_seqs=at_a_time)
    asked = {f"r{i}": prompt for i, prompt in enumerate(questions(16))}
    num_steps, texts = [], []
    for _ in ("first", "second"):
        before = len(plans(engine))
        outcomes = run(engine, *(generate(name, prompt, max_tokens=40) for name, prompt in asked.items()))
        num_steps.append(len(plans(engine)) - before)
        texts.append({name: outcomes[name].tokens for name in asked})
    assert texts[0] == texts[1] == {name: continuation(prompt, 40) for name, prompt in asked.items()}
    assert num_steps[1] <= 0.5 * num_steps[0], num_steps


def test_the_end_of_an_answer_is_drafted_too_though_it_fills_no_page() -> None:
    engine = make_engine(num_pages=64, page_size=16)
    run(engine, generate("first", range(1, 21), max_tokens=9))  # 29 tokens: one page, 12 tokens' KV is lost
    before = len(plans(engine))
    outcome = run(engine, generate("again", range(1, 21), max_tokens=9))["again"]
    assert outcome.tokens == continuation(list(range(1, 21)), 9)
    assert len(plans(engine)) - before <= 4


def test_on_new_texts_drafts_stop_soon() -> None:
    engine = make_engine(num_pages=256, page_size=16)
    plant_drafts(engine, 0.0)
    run(engine, *(generate(f"r{i}", [i + 1, 2, 3], max_tokens=64) for i in range(8)))
    first = sum(drafted_rows(engine))
    run(engine, *(generate(f"s{i}", [i + 31, 2, 3], max_tokens=64) for i in range(8)))
    second = sum(drafted_rows(engine)) - first
    assert first <= 8 * 8, "of the 64 tokens of each"
    assert second < first, "new requests have learned from the old ones"


def test_a_full_step_has_no_use_for_drafts() -> None:
    engine = make_engine(num_pages=256, page_size=16, max_num_seqs=64)
    engine.scheduler.pace.observe(0, 1, seconds=0.0128)
    for num in (1, 4, 16, 2, 64, 32, 8, 64, 1, 16, 4) * 3:
        engine.scheduler.pace.observe(0, num, seconds=0.0116 + 0.0012 * num)
    plant_drafts(engine, 0.5)
    run(engine, generate("alone", [5, 6], max_tokens=40))
    alone = sum(drafted_rows(engine)) / 40
    run(engine, *(generate(f"r{i}", [i + 1, 2, 3], max_tokens=40) for i in range(48)))
    together = (sum(drafted_rows(engine)) - 40 * alone) / (48 * 40)
    assert together < 0.4 * alone


def test_sources_are_judged_apart() -> None:
    engine = make_engine(num_pages=64)
    wrong: Find = lambda request, length: np.full(length, 95, "<i4").tobytes()
    plant_drafts(engine, 1.0)
    right = engine.scheduler.drafter.sources["tree"]
    engine.scheduler.drafter.sources = {"tree": wrong, "prompt": right}
    outcome = run(engine, generate("r", [1, 2, 3], max_tokens=60))["r"]
    assert outcome.tokens == continuation([1, 2, 3], 60)
    stats = engine.stats()
    assert stats["spec_decode_num_draft_tokens_total"]["tree"] <= 16
    assert stats["spec_decode_num_accepted_tokens_total"]["prompt"] >= 30
    priors = engine.scheduler.drafter.priors
    assert priors["tree"] < 0.5 < priors["prompt"]


def test_generated_tokens_enter_the_tree_with_drafts_too() -> None:
    engine = make_engine(page_size=4)
    plant_drafts(engine, 1.0)
    prompt = list(range(1, 11))
    answer = run(engine, generate("turn 1", prompt, max_tokens=23))["turn 1"].tokens
    outcome = run(engine, generate("turn 2", [*prompt, *answer, 5, 6]))["turn 2"]
    assert outcome.cached_tokens == (10 + 23 - 1) // 4 * 4
    assert outcome.tokens == continuation([*prompt, *answer, 5, 6], 8)


def test_wrong_drafts_never_enter_the_tree() -> None:
    engine = make_engine(page_size=2)
    plant_drafts(engine, 0.5)
    prompt = [1, 2, 3]
    run(engine, generate("r", prompt, max_tokens=30))
    tree, tokens = engine.scheduler.cache.tree, np.array([*prompt, *continuation(prompt, 30)], "<i4").tobytes()
    node: Node
    (node,) = tree.roots()
    path = b""
    while node.children:
        (node,) = node.children.values()  # one path, no branches
        path += node.tokens
    assert tokens.startswith(path) and len(path) == (33 - 1) // 2 * 2 * 4
    assert isinstance(engine.worker, StubWorker)


# ---------------------------------------------------------------- the plan


def test_a_plan_with_drafts() -> None:
    cache = PrefixCache(num_pages=16, page_size=4)
    request = request_of([1, 2, 3, 4, 5])
    request.append(9)
    request.lease = cache.admit(cache.match(request.namespace, bytes(request.tokens), 6), 3)
    request.num_planned = 5
    builder = PlanBuilder(3, frozenset())
    piece = builder.add(request, 1, Draft("prompt", np.array([7, 8], np.int32)))
    plan = builder.build(Grouping(4))
    assert (piece.start, piece.end, piece.row, piece.num_drafts) == (5, 6, 0, 2)
    assert plan.token_ids.tolist() == [9, 7, 8]
    assert plan.positions.tolist() == [5, 6, 7]
    assert plan.context_len.tolist() == [8]
    assert [(row.at, row.position, row.seed) for row in plan.rows] == [(0, 6, 0), (1, 7, 0), (2, 8, 0)]

"""The engine end to end over the stub worker: the same tokens whatever the schedule."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.factories import EOS, Clock, Driver, generate, make_engine, plans, plant_drafts, run
from tests.stub import VOCAB_SIZE, StubWorker, continuation
from trunkline.messages import Abort, Call, Failed, Generate, Reply, Tokens
from trunkline.sampling import SamplingParams
from trunkline.scheduler.engine import LONGEST_DELIVERY
from trunkline.step import Plan, StepResult


def prompts(num: int, *, seed: int = 0, shared: int = 10, longest: int = 30) -> list[list[int]]:
    """Prompts that share prefixes of several lengths."""
    rng = random.Random(seed)
    stem = [rng.randrange(1, VOCAB_SIZE) for _ in range(shared)]
    return [
        stem[: rng.randrange(shared + 1)] + [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, longest))]
        for _ in range(num)
    ]


SCHEDULES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "all at once": {},
    "chunks of 3": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    "chunks of 17": {"max_num_batched_tokens": 17},
    "no cache": {"caching": False},
    "small pool": {"num_pages": 14},
    "small pool, no cache": {"num_pages": 14, "caching": False},
    "large pages": {"page_size": 16, "num_pages": 12},
    "lpm": {"policy": "lpm", "max_num_seqs": 4},
    "fcfs": {"policy": "fcfs", "max_num_seqs": 4},
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_tokens_whatever_the_schedule(schedule: str, depth: int) -> None:
    requests = {f"r{i}": prompt for i, prompt in enumerate(prompts(24))}
    engine = make_engine(depth=depth, **SCHEDULES[schedule])
    for _ in ("cold", "warm"):
        outcomes = run(engine, *(generate(name, prompt, max_tokens=12) for name, prompt in requests.items()))
        for name, prompt in requests.items():
            assert outcomes[name].tokens == continuation(prompt, 12), name
    if schedule.startswith("small pool"):
        assert engine.scheduler.counters.preemptions > 0


@given(data=st.data())
@settings(deadline=None)
def test_random_traffic(data: st.DataObject) -> None:
    """Arrivals, aborts and steps in any order; every request that is not aborted gets exactly its tokens."""
    engine = make_engine(
        num_pages=data.draw(st.integers(8, 40)),
        page_size=data.draw(st.sampled_from([1, 2, 4])),
        depth=data.draw(st.integers(0, 1)),
        caching=data.draw(st.booleans()),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.integers(6, 40)),
        policy=data.draw(st.sampled_from(["window", "fcfs", "lpm", "priority"])),
        num_speculative_tokens=data.draw(st.integers(0, 5)),
    )
    plant_drafts(engine, right=data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    driver = Driver(engine)
    longest = engine.scheduler.max_tokens_per_request
    wanted: dict[str, tuple[list[int], int, bool, bool]] = {}
    aborted: set[str] = set()
    for i in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["arrive", "arrive", "group", "step", "step", "step", "abort"]))
        if action in ("arrive", "group"):
            prompt = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=longest))
            max_tokens, ignore_eos = data.draw(st.integers(1, 10)), data.draw(st.booleans())
            scored = data.draw(st.booleans())
            priority = data.draw(st.integers(0, 2))
            sampling: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
            sampling["prompt_logprobs"] = 0 if scored else None
            names = [f"r{i}.{choice}" for choice in range(1 if action == "arrive" else data.draw(st.integers(2, 4)))]
            wanted |= dict.fromkeys(names, (prompt, max_tokens, ignore_eos, scored))
            group = f"r{i}" if action == "group" else ""
            driver.send(*(generate(name, prompt, priority=priority, group=group, **sampling) for name in names))
        elif action == "abort" and wanted:
            aborted.add(name := data.draw(st.sampled_from(sorted(wanted))))
            driver.send(Abort(request_id=name))
            driver.engine.scheduler.check()
        else:
            driver.step()
    driver.drain()
    for name, (prompt, max_tokens, ignore_eos, scored) in wanted.items():
        outcome = driver.outcomes.get(name)
        if len(prompt) + 1 > longest:
            assert (
                outcome is not None and outcome.failed is not None and outcome.failed.code == "context_length_exceeded"
            )
            continue
        room = min(max_tokens, longest - len(prompt))
        expected = continuation(prompt, room, eos_token_id=None if ignore_eos else EOS)
        if name in aborted:
            assert outcome is None or outcome.tokens == expected[: len(outcome.tokens)]
            continue
        assert outcome is not None and outcome.finished is not None, name
        assert outcome.tokens == expected
        first = outcome.messages[0]
        assert isinstance(first, Tokens) and (first.prompt_logprobs is not None) == scored
        assert [score.token_ids[0] for score in first.prompt_logprobs or []] == (prompt[1:] if scored else [])
        assert outcome.finished.reason == ("stop" if not ignore_eos and expected[-1] == EOS else "length")
        assert outcome.finished.completion_tokens == len(expected)
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_warm_prompt_hits_all_whole_pages_but_the_last_tokens() -> None:
    for num_tokens in range(1, 14):
        engine = make_engine(page_size=4)
        prompt = list(range(1, num_tokens + 1))
        run(engine, generate("cold", prompt))
        assert run(engine, generate("warm", prompt))["warm"].cached_tokens == (num_tokens - 1) // 4 * 4


def test_next_chat_turn_hits_prompt_and_answer() -> None:
    engine = make_engine(page_size=4)
    prompt = list(range(1, 11))
    answer = run(engine, generate("turn 1", prompt, max_tokens=9))["turn 1"].tokens
    outcome = run(engine, generate("turn 2", [*prompt, *answer, 5, 6]))["turn 2"]
    assert outcome.cached_tokens == (10 + 9 - 1) // 4 * 4  # the last token of the answer was never computed


def test_twins_compute_their_prefix_once() -> None:
    engine = make_engine(page_size=4, num_pages=128, max_num_batched_tokens=64)
    stem = list(range(1, 41))
    run(engine, *(generate(f"r{i}", [*stem, 50 + i], max_tokens=4) for i in range(16)))
    assert engine.stats()["prompt_tokens_computed_total"] <= 41 + 15  # the stem once, then one token each


def test_salts_never_share() -> None:
    engine = make_engine()
    prompt = list(range(1, 20))
    run(engine, generate("a", prompt, salt="tenant a"))
    outcomes = run(engine, generate("b", prompt, salt="tenant b"))
    assert outcomes["b"].cached_tokens == 0
    assert outcomes["b"].tokens == continuation(prompt, 8)


def test_min_tokens_and_stop_ids_are_banned_until_then() -> None:
    engine = make_engine()
    run(engine, generate("r", [1, 2, 3], ignore_eos=False, min_tokens=3, stop_token_ids=(7,), max_tokens=6))
    rows = [row for plan in plans(engine) for row in plan.rows]
    assert [row.banned for row in rows[:4]] == [(EOS, 7), (EOS, 7), (EOS, 7), ()]


def test_stop_token_id_ends_the_request() -> None:
    prompt = [3, 1, 4]
    text = continuation(prompt, 6)
    outcome = run(make_engine(), generate("r", prompt, stop_token_ids=(text[2],)))["r"]
    assert outcome.tokens == text[: text.index(text[2]) + 1]
    assert outcome.finished is not None
    assert (outcome.finished.reason, outcome.finished.stop_token_id) == ("stop", text[2])


def test_context_full_ends_with_length() -> None:
    engine = make_engine(max_model_len=12)
    outcome = run(engine, generate("r", range(1, 10), max_tokens=None))["r"]
    assert len(outcome.tokens) == 3
    assert outcome.finished is not None and outcome.finished.reason == "length"


def test_prompt_longer_than_the_cache_is_refused_with_both_numbers() -> None:
    engine = make_engine(num_pages=4, page_size=4)
    driver = Driver(engine)
    driver.send(generate("long", [1] * 16), generate("fits", [1] * 15))
    outcomes = driver.drain()
    failed = outcomes["long"].failed
    assert failed is not None and failed.code == "context_length_exceeded" and failed.status == 400
    assert failed.message == (
        "This model's maximum context length is 16 tokens. However, your prompt resulted in 16 tokens."
        " Please reduce the length of the prompt. (The whole KV cache holds 16 tokens.)"
    )
    assert outcomes["fits"].tokens == continuation([1] * 15, 1)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [3, 5, 64])
def test_failed_row_fails_alone_and_publishes_nothing(depth: int, chunk: int) -> None:
    engine = make_engine(poison_token=96, depth=depth, max_num_batched_tokens=chunk, max_num_seqs=2)
    bad, good = [5, 6, 7, 96, 8, 9, 10, 11, 12], [5, 6, 7, 8, 9]
    outcomes = run(engine, generate("bad", bad), generate("good", good))
    failed = outcomes["bad"].failed
    assert failed is not None and failed.message == "Token 96 was read." and failed.status == 500
    assert outcomes["good"].tokens == continuation(good, 8)
    assert run(engine, generate("again", [*bad[:8], 1]))["again"].cached_tokens == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [3, 64])
def test_prompt_logprobs_cover_the_prompt_whatever_is_cached(depth: int, chunk: int) -> None:
    engine = make_engine(depth=depth, max_num_batched_tokens=chunk, max_num_seqs=2)
    prompt = list(range(1, 15))
    run(engine, generate("warm the cache", prompt))
    outcome = run(engine, generate("r", prompt, prompt_logprobs=2, logprobs=0, max_tokens=2))["r"]
    first = outcome.messages[0]
    assert isinstance(first, Tokens) and first.prompt_logprobs is not None and first.logprobs is not None
    assert [entry.token_ids[0] for entry in first.prompt_logprobs] == prompt[1:]
    assert [len(entry.token_ids) for entry in first.prompt_logprobs] == [3] * 13
    assert outcome.tokens == continuation(prompt, 2)
    assert isinstance(outcome.messages[1], Tokens) and outcome.messages[1].prompt_logprobs is None


def test_no_tokens_wanted_scores_the_prompt_only() -> None:
    outcome = run(make_engine(), generate("r", [1, 2, 3, 4, 5], max_tokens=0, prompt_logprobs=0))["r"]
    assert outcome.tokens == []
    assert isinstance(outcome.messages[0], Tokens)
    assert [e.token_ids for e in outcome.messages[0].prompt_logprobs or []] == [[2], [3], [4], [5]]
    assert outcome.finished is not None and outcome.finished.reason == "length"
    assert run(make_engine(), generate("r", [1, 2], max_tokens=0))["r"].finished is not None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Generate(request_id="r", prompt=b"", sampling=SamplingParams()), "The prompt is empty"),
        (Generate(request_id="r", prompt=b"abc", sampling=SamplingParams()), "'prompt' is '3 bytes'"),
        (generate("r", [VOCAB_SIZE]), "token ids from 0 to 96"),
        (generate("r", [-1]), "token ids from 0 to 96"),
        (generate("r", [1], logit_bias={VOCAB_SIZE: 1.0}), "'logit_bias' is 97"),
        (generate("r", [1], stop_token_ids=(VOCAB_SIZE,)), "'stop_token_ids' is 97"),
    ],
)
def test_bad_requests_are_refused_in_words(message: Generate, words: str) -> None:
    engine = make_engine()
    (answer,) = engine.handle(message)
    assert isinstance(answer, Failed) and answer.status == 400 and words in answer.message
    assert run(engine, generate("next", [1]))["next"].tokens == continuation([1], 8)


def test_a_second_request_of_the_same_id_is_refused() -> None:
    engine = make_engine()
    engine.handle(generate("r", [1]))
    (answer,) = engine.handle(generate("r", [2]))
    assert isinstance(answer, Failed) and "ids must be unique" in answer.message


def test_a_step_is_timed_from_the_end_of_the_one_before_it() -> None:
    clock = Clock()

    class TwoSeconds(StubWorker):
        def wait(self, handle: int) -> StepResult:
            clock.now += 2.0
            return super().wait(handle)

    engine = make_engine(depth=1, clock=clock)
    engine.worker = TwoSeconds(depth=1)
    run(engine, generate("r", range(1, 10), max_tokens=5))
    steps = engine.stats()["step_seconds"]
    assert steps["sum"] == 2.0 * steps["count"]


def test_calls() -> None:
    engine = make_engine()
    run(engine, generate("r", range(1, 20)))
    (reply,) = engine.handle(Call(call_id=4, method="check"))
    assert reply == Reply(call_id=4, result={"ok": True})
    (reply,) = engine.handle(Call(call_id=5, method="nothing"))
    assert isinstance(reply, Reply) and reply.error == (
        "There is no method 'nothing'; there are check, explain, flush, grammar_check,"
        " order_documents, pins, plan, queue, stats, tenants, tree, unpin."
    )
    assert engine.stats()["pages"]["tree"] == 6
    (reply,) = engine.handle(Call(call_id=6, method="flush"))
    assert reply == Reply(call_id=6, result={"pages": 6, "tier_pages": 0})
    assert engine.stats()["pages"] == {"free": 64, "tree": 0, "lease": 0, "copy": 0}
    (reply,) = engine.handle(Call(call_id=7, method="flush", args={"nonsense": 1}))
    assert isinstance(reply, Reply) and reply.error is not None and "nonsense" in reply.error


class Breaking(StubWorker):
    """Raises `error` instead of starting, or instead of waiting for, the step of that number; once."""

    def __init__(self, error: BaseException, *, at_submit: int = 0, at_wait: int = 0, depth: int = 0) -> None:
        super().__init__(depth=depth)
        self.error = error
        self.at_submit, self.at_wait = at_submit, at_wait

    def submit(self, plan: Plan) -> int:
        if plan.step == self.at_submit:
            self.at_submit = 0
            raise self.error
        return super().submit(plan)

    def wait(self, handle: int) -> StepResult:
        if handle == self.at_wait:
            self.at_wait = 0
            if isinstance(self.error, Exception):
                super().wait(handle)  # the step is over, and its result lost
            raise self.error
        return super().wait(handle)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("broken", [{"at_submit": 3}, {"at_wait": 3}])
def test_a_step_that_breaks_takes_only_its_own_requests_along(broken: dict[str, int], depth: int) -> None:
    engine = make_engine(max_num_seqs=2, depth=depth)
    engine.worker = Breaking(MemoryError("no room"), **broken, depth=depth)
    driver = Driver(engine)
    driver.send(*(generate(name, [7, 8, 9, index]) for index, name in enumerate(("a", "b", "c"))))
    with pytest.raises(MemoryError):
        driver.drain()
    engine.scheduler.check()
    driver.drain()
    assert driver.outcomes["c"].tokens == continuation([7, 8, 9, 2], 8), "it waited, and has lost nothing"
    assert driver.outcomes["a"].finished is driver.outcomes["b"].finished is None
    assert run(engine, generate("a", [7, 8, 9, 0]))["a"].tokens == continuation([7, 8, 9, 0], 8)


@pytest.mark.parametrize("depth", [0, 1])
def test_pages_of_a_first_step_that_never_began_are_free_at_once(depth: int) -> None:
    engine = make_engine(depth=depth)
    engine.worker = Breaking(MemoryError("no room"), at_submit=1, depth=depth)
    driver = Driver(engine)
    driver.send(generate("lost", range(1, 20)))
    with pytest.raises(MemoryError):
        driver.drain()
    assert engine.stats()["pages"] == {"free": 64, "tree": 0, "lease": 0, "copy": 0}
    all_pages = [7] * (64 * 4 - 1)
    driver.send(generate("all", all_pages))
    assert driver.drain(100)["all"].tokens == continuation(all_pages, 1)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_wait_that_is_interrupted_can_be_taken_up_again(depth: int) -> None:
    engine = make_engine(depth=depth)
    engine.worker = Breaking(KeyboardInterrupt(), at_wait=3, depth=depth)
    driver = Driver(engine)
    driver.send(generate("r", range(1, 10)))
    with pytest.raises(KeyboardInterrupt):
        driver.drain()
    assert driver.drain()["r"].tokens == continuation(list(range(1, 10)), 8)


# ---- when it arrived


@pytest.mark.parametrize(
    ("said", "believed"),
    [(None, 1000.0), (999.5, 999.5), (1000.0, 1000.0), (1000.5, 1000.0), (-5.0, 1000.0 - LONGEST_DELIVERY)],
)
def test_a_request_waits_from_when_its_sender_got_it(said: float | None, believed: float) -> None:
    clock = Clock()
    clock.now = 1000.0
    engine = make_engine(clock=clock)
    driver = Driver(engine)
    driver.send(msgspec.structs.replace(generate("r", [1, 2, 3]), arrival=said))
    assert engine.scheduler.requests["r"].arrival == believed
    clock.now = 1001.0
    driver.step()
    (first,) = driver.outcomes["r"].messages
    assert isinstance(first, Tokens) and first.queue_seconds == 1001.0 - believed


def test_equal_arrivals_are_served_in_the_order_of_their_messages() -> None:
    for policy in ("window", "fcfs"):
        engine = make_engine(max_num_seqs=1, policy=policy)
        driver = Driver(engine)
        driver.send(*(msgspec.structs.replace(generate(name, [3, 4]), arrival=-1.0) for name in "cab"))
        assert list(driver.drain()) == ["c", "a", "b"]

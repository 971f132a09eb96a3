"""What the scheduler decides: who is preempted, who waits, how a budget is spent."""

from tests.scheduler.factories import Clock, Driver, generate, make_engine, plans, run
from tests.stub import continuation
from trunkline.messages import Abort, Tokens
from trunkline.scheduler.admission import NUM_CANDIDATES
from trunkline.scheduler.preemption import MAX_PREEMPTIONS
from trunkline.scheduler.request import State


def running(driver: Driver) -> list[str]:
    return [request.request_id for request in driver.engine.scheduler.running]


def planned(driver: Driver, step: int = -1) -> list[int]:
    """Tokens per request of a plan."""
    plan = plans(driver.engine)[step]
    return (plan.query_start[1:] - plan.query_start[:-1]).tolist()


def test_running_requests_get_their_token_before_prompts_get_the_rest() -> None:
    driver = Driver(make_engine(max_num_batched_tokens=10))
    driver.send(generate("a", [1, 2, 3]), generate("b", [4, 5]))
    driver.step()
    assert planned(driver) == [3, 2]
    driver.send(generate("long", range(11, 50)))
    driver.step()
    assert planned(driver) == [1, 1, 8]
    driver.step()
    assert planned(driver) == [1, 1, 8]
    assert driver.drain()["long"].tokens == continuation(list(range(11, 50)), 8)


def test_the_latest_arrival_is_preempted_first_and_resumes() -> None:
    driver = Driver(make_engine(num_pages=10, page_size=4, policy="fcfs"))
    for name in "abc":
        driver.send(generate(name, [ord(name) % 50] * 8, max_tokens=20))
    preempted: list[str] = []
    before = {name: 0 for name in "abc"}
    while driver.engine.has_work:
        driver.step()
        for request in driver.engine.scheduler.requests.values():
            if request.num_preemptions > before[request.request_id]:
                before[request.request_id] = request.num_preemptions
                preempted.append(request.request_id)
    assert preempted[:2] == ["c", "b"]
    assert "a" not in preempted
    for name in "abc":
        assert driver.outcomes[name].tokens == continuation([ord(name) % 50] * 8, 20)


def test_who_was_preempted_three_times_is_spared_while_another_can_go() -> None:
    driver = Driver(make_engine(num_pages=10, page_size=4, policy="fcfs"))
    driver.send(*(generate(name, [ord(name) % 50] * 8, max_tokens=20) for name in "abc"))
    driver.step()
    driver.engine.scheduler.requests["c"].num_preemptions = MAX_PREEMPTIONS
    while driver.engine.scheduler.counters.preemptions == 0:
        driver.step()
    assert running(driver) == ["a", "c"]
    driver.drain()


def test_pages_on_their_way_are_waited_for_before_more_is_preempted() -> None:
    driver = Driver(make_engine(num_pages=12, page_size=4, policy="fcfs", depth=1, caching=False))
    driver.send(*(generate(name, [ord(name) % 50] * 8, max_tokens=20) for name in "abc"))
    while driver.engine.scheduler.counters.preemptions == 0:
        driver.step()
    assert running(driver) == ["a", "b"]
    driver.drain()


def test_the_lowest_priority_is_preempted_before_a_later_arrival() -> None:
    driver = Driver(make_engine(num_pages=10, page_size=4, policy="priority"))
    driver.send(generate("low", [1] * 8, max_tokens=20, priority=5), generate("a", [2] * 8, max_tokens=20))
    driver.send(generate("b", [3] * 8, max_tokens=20))
    while driver.engine.scheduler.counters.preemptions == 0:
        driver.step()
    states = {r.request_id: r.state for r in driver.engine.scheduler.requests.values()}
    assert states == {"low": State.WAITING, "a": State.RUNNING, "b": State.RUNNING}
    driver.drain()


def test_preempted_request_finds_its_own_pages_again() -> None:
    driver = Driver(make_engine(num_pages=16, page_size=4))
    driver.send(generate("a", [1] * 8, max_tokens=40), generate("b", [2] * 9, max_tokens=30))
    while driver.engine.scheduler.counters.preemptions == 0:
        driver.step()
    hits = driver.engine.scheduler.counters.prefix_cache_hits
    driver.drain()
    assert driver.engine.scheduler.counters.prefix_cache_hits > hits
    assert driver.outcomes["b"].cached_tokens == 0  # of its first admission


def test_a_request_alone_may_fill_the_pool() -> None:
    outcome = run(make_engine(num_pages=4, page_size=4), generate("r", [1, 2, 3], max_tokens=100))["r"]
    assert outcome.tokens == continuation([1, 2, 3], 13)
    assert outcome.finished is not None and outcome.finished.reason == "length"


def test_without_a_window_nobody_passes_a_head_that_does_not_fit() -> None:
    driver = Driver(make_engine(num_pages=8, page_size=4, policy="fcfs", window_seconds=0.0))
    driver.send(generate("a", [1] * 15, max_tokens=4))
    driver.step()
    driver.send(generate("large", [2] * 20), generate("small", [3]))
    driver.step()
    assert running(driver) == ["a"]
    driver.drain()
    assert driver.outcomes["large"].tokens == continuation([2] * 20, 8)


def test_a_page_is_left_for_those_that_run() -> None:
    driver = Driver(make_engine(num_pages=8, page_size=4))
    driver.send(generate("a", [1] * 15, max_tokens=4), generate("b", [2] * 15, max_tokens=4))
    driver.step()
    assert running(driver) == ["a"]  # the pages of "b" would be the last: "a" could not grow without preempting it
    driver.drain()
    assert driver.engine.scheduler.counters.preemptions == 0


def test_aborts_in_every_state_leave_nothing() -> None:
    driver = Driver(make_engine(num_pages=10, page_size=4, depth=1, max_num_batched_tokens=6))
    driver.send(Abort(request_id="never seen"))
    driver.send(generate("queued", [1] * 9))
    driver.send(Abort(request_id="queued"))
    driver.send(generate("chunked", [2] * 20))
    driver.step()
    driver.send(Abort(request_id="chunked"), Abort(request_id="chunked"))
    driver.send(generate("running", [3] * 4, max_tokens=20))
    for _ in range(4):
        driver.step()
    driver.send(Abort(request_id="running"))
    driver.drain()
    driver.send(Abort(request_id="running"))
    assert driver.engine.stats()["pages"]["lease"] == 0
    assert run(driver.engine, generate("next", [3] * 4))["next"].tokens == continuation([3] * 4, 8)


def test_abort_of_a_preempted_request() -> None:
    driver = Driver(make_engine(num_pages=10, page_size=4))
    driver.send(*(generate(name, [i] * 8, max_tokens=20) for i, name in enumerate("abc", 1)))
    while driver.engine.scheduler.counters.preemptions == 0:
        driver.step()
    (victim,) = driver.engine.scheduler.waiting
    driver.send(Abort(request_id=victim.request_id))
    driver.engine.scheduler.check()
    driver.drain()
    assert driver.engine.stats()["running"] == 0


def test_the_first_token_says_how_long_its_request_waited_and_read() -> None:
    clock = Clock()
    driver = Driver(make_engine(clock=clock, max_num_seqs=1))
    driver.send(generate("busy", [1], max_tokens=2))
    clock.now = 1.0
    driver.send(generate("r", [2, 3], max_tokens=2))
    for clock.now in (2.0, 3.0):
        driver.step()  # "busy" generates its two tokens
    clock.now = 5.0
    driver.step()
    driver.drain()
    first, second = (message for message in driver.outcomes["r"].messages if isinstance(message, Tokens))
    assert (first.queue_seconds, first.prefill_seconds) == (4.0, 0.0)
    assert (second.queue_seconds, second.prefill_seconds) == (None, None)


def test_max_num_seqs_bounds_the_batch() -> None:
    driver = Driver(make_engine(max_num_seqs=2))
    driver.send(*(generate(f"r{i}", [i + 1]) for i in range(5)))
    driver.step()
    assert running(driver) == ["r0", "r1"]
    assert len(driver.drain()) == 5


def test_window_admits_short_work_first_but_is_bounded() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, policy="window", max_num_seqs=1, window_seconds=20.0, window_gamma=50.0)
    engine.scheduler.pace.seconds_per_token = 0.01
    driver = Driver(engine)
    driver.send(generate("first", [1], max_tokens=3))
    driver.step()
    driver.send(generate("long", [2] * 100))  # key 0 + min(20, 50 · 1 s) = 20
    clock.now = 5.0
    driver.send(generate("short", [3] * 10))  # key 5 + 50 · 0.1 = 10
    clock.now = 21.0
    driver.send(generate("late", [4]))  # key 21 + 0.5: more than W after "long"
    order = []
    while engine.has_work:
        order += [name for name in running(driver) if name not in order]
        driver.step()
    assert order == ["first", "short", "long", "late"]


def test_lpm_admits_the_longest_match_first() -> None:
    driver = Driver(make_engine(policy="lpm", max_num_seqs=1))
    run(driver.engine, generate("seed", range(1, 30)))
    driver.send(generate("busy", [90], max_tokens=3))
    driver.step()
    driver.send(generate("cold", [40] * 20), generate("half", [*range(1, 10), 50]), generate("warm", range(1, 29)))
    order = []
    while driver.engine.has_work:
        order += [name for name in running(driver) if name not in order]
        driver.step()
    assert order == ["busy", "warm", "half", "cold"]


def test_a_warm_prompt_is_seen_however_long_the_queue() -> None:
    driver = Driver(make_engine(policy="lpm", max_num_seqs=1))
    run(driver.engine, generate("seed", range(1, 30)))
    driver.send(generate("busy", [90], max_tokens=3))
    driver.step()
    driver.send(*(generate(f"cold {i}", [40, i]) for i in range(2 * NUM_CANDIDATES)), generate("warm", range(1, 29)))
    while running(driver) in (["busy"], []):
        driver.step()
    assert running(driver) == ["warm"]


def test_a_prompt_waits_for_the_last_page_of_one_that_ends_there() -> None:
    driver = Driver(make_engine(page_size=4, max_num_batched_tokens=6))
    prompt = list(range(1, 9))
    driver.send(generate("first", prompt), generate("goes on", [*prompt, 50, 51]))
    driver.step()
    driver.step()  # has room for more than the rest of "first"
    assert running(driver) == ["first"]
    driver.drain()
    assert driver.outcomes["goes on"].cached_tokens == 8
    assert driver.engine.stats()["prompt_tokens_computed_total"] == 8 + 2


def test_who_cannot_use_the_cache_waits_for_nobody() -> None:
    driver = Driver(make_engine(page_size=4))
    driver.send(*(generate(f"r{i}", range(1, 10), prompt_logprobs=0) for i in range(3)))
    driver.step()
    assert running(driver) == ["r0", "r1", "r2"]


def test_what_a_step_in_flight_computes_is_not_published_by_an_abort() -> None:
    driver = Driver(make_engine(depth=1, page_size=4))
    run(driver.engine, generate("before", [90], max_tokens=1))
    driver.send(generate("r", range(1, 10)))
    driver.step()
    assert len(plans(driver.engine)) == 2  # the second is in flight
    driver.send(Abort(request_id="r"))
    pages = driver.engine.stats()["pages"]
    assert pages["tree"] == 0 and pages["copy"] == 3
    driver.drain()
    assert driver.engine.stats()["pages"]["free"] == 64


def test_same_arrivals_same_plans() -> None:
    def all_plans() -> list[str]:
        driver = Driver(make_engine(num_pages=14, page_size=4, depth=1, max_num_batched_tokens=17))
        driver.send(*(generate(f"r{i}", [1, 2, 3, 4, 5, i, *range(i)], max_tokens=12) for i in range(12)))
        driver.drain()
        assert driver.engine.scheduler.counters.preemptions > 0
        return [repr(plan) for plan in plans(driver.engine)]

    assert all_plans() == all_plans()


def test_steps_in_flight_never_exceed_the_workers_depth() -> None:
    engine = make_engine(depth=1)
    driver = Driver(engine)
    driver.send(generate("r", [1, 2, 3], max_tokens=5))
    driver.step()
    assert driver.outcomes == {} and len(plans(engine)) == 1
    driver.step()  # the second step is planned before the first is known
    assert plans(engine)[1].token_ids.tolist() == [-1]
    assert driver.outcomes["r"].tokens == continuation([1, 2, 3], 1)
    assert driver.drain()["r"].tokens == continuation([1, 2, 3], 5)

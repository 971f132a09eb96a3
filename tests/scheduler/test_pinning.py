"""Prompts that stay cached for a while: warming, pins, their caps and their ends. Pages have 4 tokens."""

from array import array
from typing import Any

import msgspec
import pytest

from tests.scheduler.factories import Clock, Driver, Outcome, generate, make_engine, plans, run
from tests.stub import continuation
from trunkline.messages import Call, Failed, Generate, Reply, Tokens
from trunkline.scheduler.engine import Engine

PROMPT = list(range(1, 13))  # three whole pages


def pinned(message: Generate, seconds: float = 60.0, tokens: int | None = None) -> Generate:
    return msgspec.structs.replace(message, pin_seconds=seconds, pin_tokens=tokens)


def warm(
    request_id: str, prompt: list[int], seconds: float = 60.0, tokens: int | None = None, **options: Any
) -> Generate:
    return pinned(generate(request_id, prompt, max_tokens=0, **options), seconds, tokens)


def call(engine: Engine, method: str, **args: Any) -> Any:
    (reply,) = engine.handle(Call(call_id=1, method=method, args=args))
    assert isinstance(reply, Reply) and reply.error is None, reply
    return reply.result


def num_cached(engine: Engine, prompt: list[int], **options: Any) -> int:
    """Looked at, not used."""
    args = {"tenant": "", "salt": "", **options}
    cached: int = call(engine, "plan", prompt=generate("", prompt).prompt, **args)["cached_tokens"]
    return cached


def num_pinned(outcome: Outcome) -> int:
    assert outcome.finished is not None, outcome.failed
    assert (outcome.finished.pin_id is None) == (outcome.finished.pinned_tokens == 0)
    return outcome.finished.pinned_tokens


def flood(engine: Engine) -> None:
    """Take every page that can be had."""
    token = 20
    for i in range(6):
        token += 1
        run(engine, generate(f"flood{i}", [token] * 30, max_tokens=2))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [3, 512])
def test_warm_computes_the_whole_pages_and_chooses_nothing(depth: int, budget: int) -> None:
    engine = make_engine(depth=depth, max_num_batched_tokens=budget)
    outcome = run(engine, warm("w", PROMPT))["w"]
    assert num_pinned(outcome) == 12
    (tokens,) = [message for message in outcome.messages if isinstance(message, Tokens)]
    assert tokens.token_ids == [] and tokens.cache_report is not None and tokens.cache_report.reason == "unseen"
    assert outcome.finished is not None
    assert (outcome.finished.reason, outcome.finished.completion_tokens) == ("length", 0)
    assert sum(plan.num_tokens for plan in plans(engine)) == 12, "each token once"
    longer = run(engine, generate("r", [*PROMPT, 50], max_tokens=5))["r"]
    assert longer.cached_tokens == 12
    assert longer.tokens == continuation([*PROMPT, 50], 5)


def test_warm_again_makes_it_stay_longer() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    first = run(engine, warm("w", PROMPT, 60))["w"]
    clock.now = 50.0
    again = run(engine, warm("v", PROMPT, 60))["v"]
    assert num_pinned(again) == 12 and again.cached_tokens == 8, "the last prompt token is always computed"
    assert first.finished and again.finished and first.finished.pin_id == again.finished.pin_id
    (pin,) = call(engine, "pins", tenant=None)
    assert pin["expires_in_seconds"] == 60.0


def test_without_a_pin_nothing_is_computed_for_no_tokens() -> None:
    engine = make_engine()
    outcome = run(engine, generate("r", PROMPT, max_tokens=0))["r"]
    assert outcome.finished is not None and outcome.finished.reason == "length"
    assert plans(engine) == []


@pytest.mark.parametrize("only_warm", [True, False])
def test_a_pinned_prefix_survives_pressure_until_its_time_and_not_longer(only_warm: bool) -> None:
    clock = Clock()
    engine = make_engine(num_pages=16, clock=clock)
    message = warm("w", PROMPT, 60) if only_warm else pinned(generate("w", PROMPT), 60)
    clock.now = 5.0
    assert num_pinned(run(engine, message)["w"]) == 12
    assert engine.stats()["pinned_pages"] == 3
    for clock.now in (6.0, 30.0, 64.9):
        flood(engine)
        assert num_cached(engine, [*PROMPT, 50]) == 12
    clock.now = 65.0
    engine.scheduler.schedule(clock.now)
    assert engine.stats()["pinned_pages"] == 0
    assert num_cached(engine, [*PROMPT, 50]) == 12, "it is not thrown away, either"
    flood(engine)
    assert num_cached(engine, [*PROMPT, 50]) == 0


def test_a_pin_begins_when_the_prompt_is_computed() -> None:
    clock = Clock()
    engine = make_engine(max_num_batched_tokens=4, clock=clock)
    driver = Driver(engine)
    driver.send(pinned(generate("r", PROMPT, max_tokens=9), 60))
    for clock.now in (10.0, 20.0, 30.0):
        assert call(engine, "pins", tenant=None) == []
        driver.step()
    (pin,) = call(engine, "pins", tenant=None)
    assert (pin["num_tokens"], pin["expires_in_seconds"]) == (12, 60.0)
    assert num_pinned(driver.drain()["r"]) == 12, "and not what was generated"


@pytest.mark.parametrize(("tokens", "expected"), [(11, 8), (4, 4), (3, 0), (12, 12), (99, 12), (None, 12)])
def test_only_the_first_tokens(tokens: int | None, expected: int) -> None:
    engine = make_engine()
    outcome = run(engine, pinned(generate("r", PROMPT), tokens=tokens))["r"]
    assert num_pinned(outcome) == expected
    assert engine.stats()["pinned_pages"] == expected // 4
    assert outcome.tokens == continuation(PROMPT, 8)


def test_over_the_share_of_its_tenant() -> None:
    """A quarter of 64 pages: 16. An ordinary request is served; one that only warms fails, in words."""
    engine = make_engine()
    assert num_pinned(run(engine, warm("w", PROMPT))["w"]) == 12
    long = list(range(20, 76))  # 14 pages
    served = run(engine, pinned(generate("r", long)))["r"]
    assert served.tokens == continuation(long, 8)
    assert num_pinned(served) == 0
    refused = run(engine, warm("v", long))["v"].failed
    assert refused == Failed(
        request_id="v",
        message="With this prefix 17 pages of 4 tokens would be pinned; one tenant may pin 16."
        " Unpin another prefix, or wait until one ends.",
        status=400,
        type="invalid_request_error",
        code="pin_refused",
    )
    assert num_pinned(run(engine, warm("other", long, tenant="other"))["other"]) == 56, "each has its own share"
    engine.scheduler.check()


def test_too_short_to_pin() -> None:
    engine = make_engine()
    failed = run(engine, warm("w", [1, 2, 3]))["w"].failed
    assert failed is not None and failed.message.startswith("The prefix is shorter than a page of 4 tokens")


def test_nothing_to_keep_without_a_cache() -> None:
    engine = make_engine(caching=False)
    failed = run(engine, warm("w", PROMPT))["w"].failed
    assert failed is not None and failed.code == "pin_refused" and "--no-enable-prefix-caching" in failed.message
    assert plans(engine) == []
    outcome = run(engine, pinned(generate("r", PROMPT)))["r"]
    assert num_pinned(outcome) == 0 and outcome.tokens == continuation(PROMPT, 8)


def test_a_refused_pin_is_not_tried_again_with_what_is_generated() -> None:
    engine = make_engine()
    outcome = run(engine, pinned(generate("r", [1, 2, 3], max_tokens=20)))["r"]
    assert num_pinned(outcome) == 0
    assert engine.stats()["pinned_pages"] == 0


def half_pinned() -> Engine:
    """An engine of 16 pages, half of them pinned for years."""
    engine = make_engine(num_pages=16)
    for i in range(2):
        run(engine, warm(f"w{i}", [i + 1] * 16, 1e9, tenant=f"t{i}"))
    assert engine.stats()["pinned_pages"] == 8
    return engine


def test_pins_give_way_to_a_request_that_would_wait_for_nobody_else() -> None:
    engine = half_pinned()
    outcome = run(engine, generate("r", [50] * 40, max_tokens=4))["r"]  # 11 pages
    assert outcome.tokens == continuation([50] * 40, 4)
    assert engine.stats()["pinned_pages"] == 4, "one pin was enough"


def test_pins_give_way_to_a_request_that_is_the_last_to_run() -> None:
    engine = half_pinned()
    outcome = run(engine, generate("r", [50] * 4, max_tokens=50))["r"]
    assert outcome.tokens == continuation([50] * 4, 50)
    assert sum(engine.stats()["num_preemptions_total"].values()) == 0


def test_pins_stay_while_others_run() -> None:
    """A request that does not fit beside those that run waits for them."""
    engine = half_pinned()
    run(engine, generate("a", [50] * 4, max_tokens=12), generate("b", [60] * 20, max_tokens=4))
    assert engine.stats()["pinned_pages"] == 8


def test_pins_and_unpin() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    run(engine, warm("w", PROMPT, 60, tenant="acme", salt="s"), warm("v", PROMPT, 30, tenant="other"))
    clock.now = 10.0
    acme, other = call(engine, "pins", tenant=None)
    tokens = array("i", PROMPT[:12]).tobytes()
    assert acme == {
        "id": 1,
        "tenant": "acme",
        "salt": "s",
        "num_tokens": 12,
        "tokens": tokens,
        "ends_with": tokens,
        "expires_in_seconds": 50.0,
    }
    assert call(engine, "pins", tenant="other") == [other]
    assert call(engine, "unpin", tenant="other", pin_id=1) is False, "another tenant's"
    assert call(engine, "unpin", tenant="acme", pin_id=1) is True
    assert call(engine, "unpin", tenant=None, pin_id=1) is False, "gone"
    assert call(engine, "unpin", tenant=None, pin_id=other["id"]) is True
    assert call(engine, "pins", tenant=None) == []
    assert num_cached(engine, [*PROMPT, 50], tenant="acme", salt="s") == 12, "it may be evicted, but needn't be"


def test_statistics_of_an_idle_engine_count_no_pin_that_has_ended() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    run(engine, warm("w", PROMPT, seconds=60))
    assert engine.stats()["pinned_pages"] == 3
    clock.now = 60.0
    assert engine.stats()["pinned_pages"] == 0


def test_a_pin_outlives_its_request() -> None:
    engine = make_engine()
    driver = Driver(engine)
    driver.send(pinned(generate("r", PROMPT, max_tokens=9)))
    driver.step()
    engine.scheduler.abort("r")
    engine.scheduler.check()
    assert engine.stats()["pinned_pages"] == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_preempted_half_way_is_pinned_once(depth: int) -> None:
    engine = make_engine(num_pages=8, depth=depth, max_num_batched_tokens=4)
    outcomes = run(engine, generate("a", [1] * 5, max_tokens=22), pinned(generate("b", [2] * 9, max_tokens=9)))
    assert outcomes["b"].tokens == continuation([2] * 9, 9)
    assert outcomes["a"].tokens == continuation([1] * 5, 22)
    assert num_pinned(outcomes["b"]) == 8
    engine.scheduler.check()

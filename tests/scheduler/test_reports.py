"""Each cause of a miss, built for real with an engine over the stub worker: what the caller is told, field by field.

Pages have 4 tokens. A request that generates one token computes its prompt only.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.factories import Clock, Driver, Outcome, generate, make_engine, run
from trunkline.messages import CacheReport, Call, Generate, Reply, Tokens
from trunkline.scheduler.engine import Engine
from trunkline.scheduler.reports import MAX_FAMILIES

PROMPT = list(range(1, 14))  # three whole pages, and a token


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def ask(request_id: str, prompt: list[int], **options: Any) -> Generate:
    return generate(request_id, prompt, **{"max_tokens": 1, **options})


def told(outcome: Outcome) -> CacheReport:
    """The report that came with the first Tokens, and with no other."""
    tokens = [message for message in outcome.messages if isinstance(message, Tokens)]
    first, *others = [message.cache_report for message in tokens]
    assert first is not None and others == [None] * len(others)
    assert first.cached_tokens == outcome.cached_tokens == tokens[0].cached_tokens
    assert sum(first.cached_by_tier.values()) == first.cached_tokens
    return first


def report_of(engine: Engine, prompt: list[int], **options: Any) -> CacheReport:
    """Send a prompt, and what is told of it. Just before, the call "explain" says the same."""
    answer = None
    if "prompt_logprobs" not in options:
        answer = explained(engine, prompt, **options)
    engine_tells = told(run(engine, ask("asked", prompt, **options))["asked"])
    assert answer in (None, engine_tells)
    return engine_tells


def explained(engine: Engine, prompt: list[int], tenant: str = "", salt: str = "") -> CacheReport:
    args = {"tenant": tenant, "salt": salt, "prompt": packed(prompt)}
    before = engine.scheduler.cache.show()
    (reply,) = engine.handle(Call(call_id=1, method="explain", args=args))
    assert isinstance(reply, Reply) and reply.error is None, reply
    assert engine.scheduler.cache.show() == before, "a look changes nothing"
    return msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(reply.result)), CacheReport)


def misses(engine: Engine) -> dict[str, int]:
    counts: dict[str, int] = engine.stats()["prefix_cache_misses_total"]
    return counts


def report(cached_tokens: int, reason: str, prompt_tokens: int = len(PROMPT), **fields: Any) -> CacheReport:
    by_tier = {"device": cached_tokens} if cached_tokens else {}
    return CacheReport(
        prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, cached_by_tier=by_tier, reason=reason, **fields
    )


def test_unseen_then_complete() -> None:
    engine = make_engine()
    assert report_of(engine, PROMPT) == report(0, "unseen")
    assert report_of(engine, PROMPT) == report(12, "complete")
    assert misses(engine) == {"unseen": 1}, "nothing was missed the second time"


def test_short() -> None:
    engine = make_engine()
    run(engine, ask("r", PROMPT))
    assert report_of(engine, PROMPT[:4]) == report(0, "short", 4)
    assert misses(engine) == {"unseen": 1, "short": 1}


def test_differs() -> None:
    engine = make_engine()
    run(engine, ask("r", PROMPT))
    prompt = [*PROMPT[:6], 50, *PROMPT[7:]]
    expected = packed([7, 8, 9, 10, 11, 12])
    assert report_of(engine, prompt) == report(4, "differs", position=6, expected=expected)


def test_differs_from_what_was_generated() -> None:
    """The next turn of a chat, whose template did not repeat the answer as it was: the last page was not whole."""
    engine = make_engine()
    answer = run(engine, generate("r", PROMPT[:8], max_tokens=3))["r"].tokens
    prompt = [*PROMPT[:8], answer[0], 96, 95, 94, 93]
    assert report_of(engine, prompt) == report(8, "differs", position=9, expected=packed(answer[1:]))


def test_evicted_by_admission() -> None:
    clock = Clock()
    engine = make_engine(num_pages=8, clock=clock)
    run(engine, ask("r", PROMPT))
    clock.now = 10.0
    run(engine, ask("other", [90] * 24))  # 6 pages, and there are 5 besides those of the first
    clock.now = 12.5
    assert report_of(engine, PROMPT) == report(4, "evicted", seconds_ago=2.5, cause="admission")
    assert misses(engine) == {"unseen": 2, "evicted": 1}


def test_evicted_by_growth() -> None:
    clock = Clock()
    engine = make_engine(num_pages=8, clock=clock)
    run(engine, ask("r", PROMPT))
    clock.now = 4.0
    run(engine, generate("other", [90] * 4, max_tokens=24))
    clock.now = 5.0
    assert report_of(engine, PROMPT) == report(4, "evicted", seconds_ago=1.0, cause="growth")


def test_flushed() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    run(engine, ask("r", PROMPT))
    clock.now = 1.0
    engine.handle(Call(call_id=1, method="flush"))
    clock.now = 61.0
    assert report_of(engine, PROMPT) == report(0, "evicted", seconds_ago=60.0, cause="flush")


def test_another_salt() -> None:
    engine = make_engine()
    run(engine, ask("r", PROMPT, tenant="acme", salt="a"))
    run(engine, ask("s", [*PROMPT[:4], 50], tenant="acme", salt="b"))
    assert report_of(engine, PROMPT, tenant="acme", salt="b") == report(4, "namespace")
    assert report_of(engine, PROMPT, tenant="acme", salt="c") == report(0, "namespace")
    assert report_of(engine, PROMPT, tenant="acme", salt="b") == report(12, "complete")


def test_computing() -> None:
    """Asked while another request reads the same prompt: only a look can be early enough, a request would wait for it."""
    engine = make_engine(max_num_batched_tokens=4)
    driver = Driver(engine)
    driver.send(ask("r", PROMPT, tenant="acme"))
    driver.step()
    assert explained(engine, PROMPT, tenant="acme") == report(4, "computing")
    assert explained(engine, [*PROMPT[:7], 50, 50], tenant="acme").reason != "computing", "it is another page"
    assert explained(engine, PROMPT, tenant="other") == report(0, "unseen")
    driver.send(ask("twin", PROMPT, tenant="acme"))
    assert told(driver.drain()["twin"]) == report(12, "complete")


def test_prompt_logprobs() -> None:
    engine = make_engine()
    run(engine, ask("r", PROMPT))
    assert report_of(engine, PROMPT, prompt_logprobs=0) == report(0, "prompt_logprobs")
    assert told(run(engine, ask("s", PROMPT, prompt_logprobs=0, max_tokens=0))["s"]).reason == "prompt_logprobs"
    assert misses(engine) == {"unseen": 1, "prompt_logprobs": 2}


def test_disabled() -> None:
    engine = make_engine(caching=False)
    for _ in range(2):
        assert report_of(engine, PROMPT) == report(0, "disabled")


def test_all_of_a_group_are_told_the_same() -> None:
    engine = make_engine()
    outcomes = run(engine, ask("a", PROMPT, group="g"), ask("b", PROMPT, group="g"))
    assert told(outcomes["a"]) == told(outcomes["b"]) == report(0, "unseen")
    assert misses(engine) == {"unseen": 1}, "it is one prompt"


@pytest.mark.parametrize("depth", [0, 1])
def test_only_the_first_admission_is_reported(depth: int) -> None:
    """A request that is preempted and admitted again finds its own pages: that is not what its prompt found."""
    engine = make_engine(num_pages=7, depth=depth)
    outcomes = run(engine, *(generate(name, [token] * 9, max_tokens=12) for name, token in (("a", 1), ("b", 2))))
    assert sum(engine.stats()["num_preemptions_total"].values()) > 0
    for outcome in outcomes.values():
        assert told(outcome) == report(0, "unseen", 9)
    assert misses(engine) == {"unseen": 2}


def test_what_makes_room_for_a_request_still_explains_it() -> None:
    """The nearest prompt is evicted by the very admission of the one that is explained by it."""
    engine = make_engine(num_pages=4)
    run(engine, ask("r", PROMPT[:12]))
    run(engine, ask("other", [*PROMPT[:4], 60, 61, 62, 63]))
    assert report_of(engine, [*PROMPT[:5], *[70] * 10]).reason == "differs"
    assert report_of(engine, [60] * 15).reason == "unseen"


def test_namespaces_remembered_are_bounded() -> None:
    engine = make_engine()
    for i in range(MAX_FAMILIES + 10):
        run(engine, ask("r", [1, 2], tenant=f"t{i}"))
    for i in range(100):
        run(engine, ask("r", [1, 2], tenant="acme", salt=f"s{i}"))
    families = engine.scheduler.admission.reports._families
    assert len(families) == MAX_FAMILIES
    assert max(map(len, families.values())) == 64


def test_pages_in_host_memory_are_cached_too() -> None:
    engine = make_engine(num_pages=12, host_slots=64)
    run(engine, ask("r", PROMPT))
    for i in range(2):
        run(engine, ask(f"other{i}", [90 + i] * 36))
    everything = CacheReport(prompt_tokens=13, cached_tokens=12, cached_by_tier={"host": 12}, reason="complete")
    tiers = engine.scheduler.tiering.tiers
    assert tiers is not None
    order = [*tiers.host._saved, *tiers.host._unsaved]
    assert explained(engine, PROMPT) == everything
    assert order == [*tiers.host._saved, *tiers.host._unsaved], "nothing counts as used there, either"
    longer = report_of(engine, [*PROMPT, *[60] * 9])
    assert (longer.cached_by_tier, longer.reason) == ({"host": 12}, "unseen")
    assert misses(engine) == {"unseen": 4}


# ---- two tenants

prompts_of_a_tenant = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4)


@given(ours=prompts_of_a_tenant, theirs=prompts_of_a_tenant)
@settings(deadline=None, max_examples=40)
def test_what_one_tenant_is_told_says_nothing_of_another(ours: list[list[int]], theirs: list[list[int]]) -> None:
    """All that tenant B is told is the same, byte for byte, whether or not tenant A has sent the same text, and more:
    A's tokens are those of B, and those 10 higher."""
    alone, beside = make_engine(num_pages=512), make_engine(num_pages=512)
    for i, tokens in enumerate([*theirs, *ours, *([token + 10 for token in prompt] for prompt in [*ours, *theirs])]):
        for salt in ("", "s"):
            run(beside, ask(f"a{i}{salt}", tokens, tenant="a", salt=salt))
    for i, tokens in enumerate(ours):
        salt = "s" if i % 2 else ""
        from_alone, from_beside = (
            told(run(engine, ask(f"b{i}", tokens, tenant="b", salt=salt))[f"b{i}"]) for engine in (alone, beside)
        )
        assert from_alone == from_beside
        assert explained(alone, tokens, "b", "t") == explained(beside, tokens, "b", "t")
    trees = [
        engine.handle(Call(call_id=1, method="tree", args={"tenant": "b", "depth": 9, "limit": 99, "top": 9}))
        for engine in (alone, beside)
    ]
    assert trees[0] == trees[1]

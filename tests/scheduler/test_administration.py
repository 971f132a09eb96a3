"""What the engine answers about its cache and its queue. Pages have 4 tokens; what is asked about is tested in test_reports.py,
pins in test_pinning.py, the nodes of the tree in tests/radix/test_view.py."""

from typing import Any

import msgspec
import pytest

from tests.scheduler.factories import Clock, Driver, generate, make_engine, run
from trunkline.messages import Call, Reply
from trunkline.scheduler.engine import Engine
from trunkline.scheduler.pace import context_of

PROMPT = list(range(1, 14))


def call(engine: Engine, method: str, **args: Any) -> Any:
    """The answer, as it arrives at the other side of the socket."""
    (reply,) = engine.handle(Call(call_id=1, method=method, args=args))
    assert isinstance(reply, Reply) and reply.error is None, reply
    return msgspec.msgpack.decode(msgspec.msgpack.encode(reply.result))


def plan(engine: Engine, prompt: list[int], tenant: str = "", salt: str = "") -> dict[str, Any]:
    answer: dict[str, Any] = call(engine, "plan", tenant=tenant, salt=salt, prompt=generate("", prompt).prompt)
    return answer


def learn(engine: Engine, *, base: float, per_token: float) -> None:
    """Let the engine have measured steps that take so long."""
    for num_tokens in (8, 16, 32, 64) * 30:
        engine.scheduler.pace.observe(num_tokens, 0, base + per_token * num_tokens)


# ---- plan


def test_plan_of_a_cold_prompt_and_a_warm_one() -> None:
    engine = make_engine()
    cold = {"cached_tokens": 0, "cached_by_tier": {}, "tokens_to_compute": 13}
    unknown = {"expected_ttft_seconds": None, "queue_seconds": None, "prefill_seconds": None}
    assert plan(engine, PROMPT) == cold | unknown
    run(engine, generate("r", PROMPT))
    learn(engine, base=0.0, per_token=0.01)
    warm = plan(engine, PROMPT)
    assert warm["cached_by_tier"] == {"device": 12} and warm["cached_tokens"] == 12 and warm["tokens_to_compute"] == 1
    assert warm["queue_seconds"] == 0
    assert warm["expected_ttft_seconds"] == warm["prefill_seconds"] == engine.scheduler.pace.seconds(1, 0, context=12)
    assert plan(engine, [50] * 13)["prefill_seconds"] == pytest.approx(0.13, rel=0.1)


def test_plan_counts_the_steps_of_a_long_prompt() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    learn(engine, base=1.0, per_token=0.01)
    assert plan(engine, [50] * 100)["prefill_seconds"] == pytest.approx(7 * 1.0 + 100 * 0.01, rel=0.1)


def test_plan_knows_that_the_end_of_a_long_prompt_takes_longer() -> None:
    """Of prompts in the queue as well, and of one whose beginning is cached."""
    engine = make_engine(num_pages=400, max_num_seqs=1, max_num_batched_tokens=64, policy="fcfs")
    run(engine, generate("r", [7] * 800, max_tokens=1))
    for start, num in ((0, 8), (0, 16), (0, 64), (64, 64), (600, 64), (1000, 32)) * 30:
        context = context_of(start, num)
        engine.scheduler.pace.observe(num, 0, 0.5 + 0.01 * num + 0.0001 * context, context)

    def seconds(start: int, end: int) -> float:
        num_steps = -(-(end - start) // 64)
        return 0.5 * num_steps + 0.01 * (end - start) + 0.0001 * context_of(start, end - start)

    assert plan(engine, [50] * 100)["prefill_seconds"] == pytest.approx(seconds(0, 100), rel=0.05)
    assert plan(engine, [50] * 800)["prefill_seconds"] == pytest.approx(seconds(0, 800), rel=0.05)
    assert plan(engine, [*[7] * 800, *[8] * 64])["prefill_seconds"] == pytest.approx(seconds(800, 864), rel=0.05)
    driver = Driver(engine)
    driver.send(generate("a", [60] * 500, max_tokens=1), generate("b", [61] * 500, max_tokens=1))
    assert plan(engine, PROMPT)["queue_seconds"] == pytest.approx(2 * seconds(0, 500), rel=0.05)


def test_plan_counts_what_is_queued_before() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=16, policy="fcfs")
    learn(engine, base=0.0, per_token=0.01)
    driver = Driver(engine)
    driver.send(*(generate(f"r{i}", [20 + i] * 60, max_tokens=1) for i in range(3)))
    assert plan(engine, PROMPT)["queue_seconds"] == pytest.approx(1.8, rel=0.1)
    driver.step()
    assert plan(engine, PROMPT)["queue_seconds"] == pytest.approx(1.64, rel=0.1), "16 tokens are computed"
    driver.drain()
    assert plan(engine, PROMPT)["queue_seconds"] == 0


def test_plan_knows_the_order_of_the_queue() -> None:
    """A short prompt goes before long ones that came just now; a prompt that is cached, too."""
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=16, window_seconds=1000, window_gamma=50)
    run(engine, generate("r", list(range(1, 60)), max_tokens=1))
    learn(engine, base=0.0, per_token=0.01)
    driver = Driver(engine)
    driver.send(*(generate(f"r{i}", [70 + i] * 40, max_tokens=1) for i in range(2)))
    assert plan(engine, [50] * 10)["queue_seconds"] == 0
    assert plan(engine, list(range(1, 60)))["queue_seconds"] == 0
    assert plan(engine, [50] * 60)["queue_seconds"] == pytest.approx(0.8, rel=0.1)


def test_plan_shares_time_with_other_tenants() -> None:
    engine = make_engine(max_num_seqs=1)
    learn(engine, base=0.0, per_token=0.01)
    driver = Driver(engine)
    driver.send(*(generate(f"r{i}", [20 + i] * 100, max_tokens=1, tenant="flood") for i in range(5)))
    assert plan(engine, PROMPT, tenant="quiet")["queue_seconds"] == pytest.approx(0.13, rel=0.1), "as much as its own"
    assert plan(engine, PROMPT, tenant="flood")["queue_seconds"] <= 5.0


@pytest.mark.parametrize("prompt", [b"", b"123"])
@pytest.mark.parametrize("method", ["plan", "explain"])
def test_a_prompt_that_is_none(method: str, prompt: bytes) -> None:
    engine = make_engine()
    (reply,) = engine.handle(Call(call_id=1, method=method, args={"tenant": "", "salt": "", "prompt": prompt}))
    assert isinstance(reply, Reply) and reply.result is None
    assert reply.error == (
        f"{method} failed: 'prompt' is '{len(prompt)} bytes'; allowed is at least one token id of 4 bytes."
    )


# ---- queue


def test_queue() -> None:
    clock = Clock()
    engine = make_engine(num_pages=16, max_num_batched_tokens=8, clock=clock, max_num_seqs=2, policy="fcfs")
    run(engine, generate("before", PROMPT, max_tokens=1, tenant="acme"))
    driver = Driver(engine)
    driver.send(generate("a", [*PROMPT[:12], 50, *[51] * 9], max_tokens=20, tenant="acme"))
    clock.now = 1.0
    driver.step()
    driver.step()
    driver.step()
    driver.send(generate("b", [60] * 9, tenant="other"), generate("c", [70] * 60, max_tokens=4, tenant="acme"))
    clock.now = 3.0
    driver.step()
    queue = call(engine, "queue", tenant=None)
    assert queue["running"] == [
        {
            "request_id": "a",
            "tenant": "acme",
            "seconds": 3.0,
            "queue_seconds": 1.0,
            "prompt_tokens": 22,
            "cached_tokens": 12,
            "prompt_tokens_computed": 22,
            "generated_tokens": 3,
        },
        {
            "request_id": "b",
            "tenant": "other",
            "seconds": 2.0,
            "queue_seconds": 2.0,
            "prompt_tokens": 9,
            "cached_tokens": 0,
            "prompt_tokens_computed": 7,
            "generated_tokens": 0,
        },
    ]
    assert queue["waiting"] == [
        {
            "request_id": "c",
            "tenant": "acme",
            "seconds": 2.0,
            "prompt_tokens": 60,
            "cached_tokens": 0,
            "why": "all 2 places are taken",
        }
    ]
    assert [entry["request_id"] for entry in call(engine, "queue", tenant="acme")["running"]] == ["a"]
    assert call(engine, "queue", tenant="other")["waiting"] == []
    first = call(engine, "queue", tenant=None, limit=1)
    assert [len(first["running"]), first["num_running"], first["num_waiting"]] == [1, 2, 1]
    driver.drain()
    assert call(engine, "queue", tenant=None) == {"waiting": [], "running": [], "num_waiting": 0, "num_running": 0}


def test_queue_of_a_group() -> None:
    engine = make_engine()
    driver = Driver(engine)
    driver.send(generate("a", PROMPT, group="g"), generate("b", PROMPT, group="g"))
    waiting = call(engine, "queue", tenant=None)["waiting"]
    assert [(entry["request_id"], entry["why"]) for entry in waiting] == [
        ("a", "its turn comes next"),
        ("b", "goes on from a, which has its prompt"),
    ]


# ---- the whole


def test_tree_and_reuse_curve() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    for _ in range(3):
        run(engine, generate("r", PROMPT, max_tokens=1, tenant="acme"))
    run(engine, generate("s", PROMPT, max_tokens=1, tenant="other"))
    clock.now = 5.0
    tree = call(engine, "tree", tenant=None, depth=4, limit=10, top=3)
    assert [(root["tenant"], len(root["children"])) for root in tree["namespaces"]] == [("acme", 1), ("other", 1)]
    node = tree["namespaces"][0]["children"][0]
    assert (node["num_tokens"], node["hits"], node["tokens_saved"], node["last_use_seconds_ago"]) == (12, 2, 24, 5.0)
    assert [(prefix["tenant"], prefix["tokens_saved"]) for prefix in tree["top"]] == [("acme", 24)]
    curve = tree["reuse_curve"]
    assert [(point["times"], point["num_tokens"]) for point in curve[:3]] == [(0.25, 64), (0.5, 128), (1, 256)]
    assert curve[-1]["hit_rate"] == pytest.approx(24 / 52), "twice 12 of four times 13"
    own = call(engine, "tree", tenant="other", depth=4, limit=10, top=3)
    assert [root["tenant"] for root in own["namespaces"]] == ["other"]
    assert (own["top"], own["reuse_curve"]) == ([], [])


def test_prompts_count_once_for_the_reuse_curve() -> None:
    engine = make_engine(num_pages=7)
    run(engine, *(generate(name, [token] * 9, max_tokens=12) for name, token in (("a", 1), ("b", 2))))
    assert sum(engine.stats()["num_preemptions_total"].values()) > 0
    assert engine.scheduler.reuse.num_tokens == 18
    assert engine.scheduler.reuse.hit_rate(1000) == 0
    run(engine, generate("c", [1] * 9, group="g"), generate("d", [1] * 9, group="g"))
    assert engine.scheduler.reuse.num_tokens == 27, "a group reads its prompt once"


def test_flush() -> None:
    engine = make_engine()
    for tenant, salt in (("acme", ""), ("acme", "s"), ("other", "s")):
        run(engine, generate("r", PROMPT, max_tokens=1, tenant=tenant, salt=salt))
    assert call(engine, "flush", tenant="acme", salt="s") == {"pages": 3, "tier_pages": 0}
    assert plan(engine, PROMPT, "acme")["cached_tokens"] == 12
    assert call(engine, "flush", tenant="acme", salt=None)["pages"] == 3
    assert plan(engine, PROMPT, "other", "s")["cached_tokens"] == 12
    assert call(engine, "flush")["pages"] == 3


def test_flush_spares_what_is_in_use() -> None:
    engine = make_engine()
    driver = Driver(engine)
    driver.send(msgspec.structs.replace(generate("w", PROMPT, max_tokens=0), pin_seconds=60))
    driver.drain()
    driver.send(generate("r", [50] * 9, max_tokens=9))
    driver.step()
    assert call(engine, "flush")["pages"] == 0
    driver.drain()
    assert call(engine, "flush")["pages"] == 4
    assert plan(engine, PROMPT)["cached_tokens"] == 12

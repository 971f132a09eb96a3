"""When pages get to disk: pinned, under load, at a graceful end; and what is remembered of those that were flushed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.radix.tier_factories import ManualIO
from tests.scheduler.factories import Clock, Driver, generate, make_engine, run
from tests.scheduler.test_tiering import ask, copies, killed, make_engine_over, prompt, served
from tests.stub import StubWorker
from trunkline.config import CacheConfig
from trunkline.messages import Call, Generate, Reply
from trunkline.radix.tiers import BATCH_SECONDS
from trunkline.scheduler.engine import LEAST_CLOSING_SECONDS, SAVING_SECONDS, Engine


def files(folder: Path) -> int:
    return len(list(folder.glob("*/*.kv")))


def pinned(tokens: list[int], name: str = "w", seconds: float = 60.0, **options: Any) -> Generate:
    return msgspec.structs.replace(generate(name, tokens, max_tokens=0, **options), pin_seconds=seconds)


def test_pinned_prefixes_are_on_disk_at_once(tmp_path: Path) -> None:
    engine = make_engine(num_pages=64, host_slots=64, disk_cache_dir=tmp_path)
    run(engine, generate("before", prompt(1, 9), max_tokens=1), pinned(prompt(1, 24)))
    assert engine.tiers is not None
    engine.tiers.wait_for_writes(10.0)
    assert files(tmp_path) > 0
    assert ask(killed(tmp_path), prompt(1, 25)).cached_tokens == 24
    assert killed(tmp_path).scheduler.cache.pins() == [], "the pin itself ended with the process"


def test_without_a_disk_pins_are_not_copied() -> None:
    engine = make_engine(num_pages=64, host_slots=64)
    run(engine, pinned(prompt(1, 24)))
    assert copies(engine) == []


def test_the_disk_is_written_to_though_the_engine_is_never_idle(tmp_path: Path) -> None:
    io, clock = ManualIO(), Clock()
    engine = make_engine(num_pages=64, host_slots=64, disk_cache_dir=tmp_path, background=io, clock=clock)
    driver = Driver(engine)
    driver.send(generate("busy", [5] * 3, max_tokens=100))
    for name in ("first", "second"):
        driver.send(generate(name, prompt(1), max_tokens=1))
        while name in engine.scheduler.requests:
            driver.step()
    used_at = clock.now
    while not io.jobs:
        driver.step()
        clock.now += 0.05
        assert clock.now - used_at < BATCH_SECONDS + 0.2
        assert "busy" in engine.scheduler.requests
    io.run_all()
    assert files(tmp_path) == 1
    assert ask(killed(tmp_path), prompt(1)).cached_tokens == 16


@pytest.mark.parametrize("host_slots", [3, 64])
def test_a_graceful_end_brings_to_disk_what_was_used_again_or_is_pinned(tmp_path: Path, host_slots: int) -> None:
    """Though there was no room for it on the way until then, and requests are still running."""
    engine = make_engine(num_pages=128, host_slots=host_slots, disk_cache_dir=tmp_path)
    tiers = engine.tiers
    assert tiers is not None
    tiers.store = lambda *_: 0  # type: ignore[method-assign]
    run(engine, pinned(prompt(1, 40)))
    for _ in range(2):
        ask(engine, prompt(2, 41))
    ask(engine, prompt(3, 41))
    assert files(tmp_path) == 0
    del tiers.store
    engine.handle(generate("running", prompt(4, 41), max_tokens=50))
    engine.step()
    engine.close()
    engine.close()
    engine = killed(tmp_path)
    assert [ask(engine, prompt(seed, 41)).cached_tokens for seed in (1, 2, 3)] == [40, 40, 0]


def test_a_graceful_end_right_after_the_pin(tmp_path: Path) -> None:
    """The copy was still to come."""
    engine = make_engine(num_pages=64, host_slots=64, disk_cache_dir=tmp_path)
    driver = Driver(engine)
    driver.send(pinned(prompt(1, 40)))
    while "w" not in driver.outcomes or driver.outcomes["w"].finished is None:
        driver.step()
    assert engine.scheduler.copies, "or this tests nothing"
    engine.close()
    assert ask(killed(tmp_path), prompt(1, 41)).cached_tokens == 40


def test_a_graceful_end_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    class Hanging(ManualIO):
        def wait(self, futures: Any, seconds: float) -> None:
            clock.now += seconds

        def close(self, seconds: float) -> None:
            closed.append(seconds)

    io, clock, closed = Hanging(), Clock(), list[float]()
    engine = make_engine(num_pages=64, host_slots=4, disk_cache_dir=tmp_path, background=io, clock=clock)
    run(engine, pinned(prompt(1, 40)))
    engine.close()
    assert clock.now <= SAVING_SECONDS + 0.1 and closed == [LEAST_CLOSING_SECONDS]


def test_an_end_that_fails_is_still_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StubWorker):
        broken = closed = False

        def submit(self, plan: Any) -> int:
            if self.broken:
                raise RuntimeError("the device is gone")
            return super().submit(plan)

        def close(self) -> None:
            self.closed = True

    worker = Broken(num_pages=64, page_size=4, host_slots=2, fingerprint="ab" * 16)
    engine = make_engine_over(worker, CacheConfig(block_size=4, disk_cache_dir=str(tmp_path)))
    run(engine, pinned(prompt(1, 40)))
    worker.broken = True
    engine.close()
    assert worker.closed and "Not all that should be on disk" in caplog.text


def why(engine: Engine, tokens: list[int], salt: str = "") -> tuple[str, str, float | None]:
    args = {"tenant": "", "salt": salt, "prompt": generate("", tokens).prompt}
    reply = engine.handle(Call(call_id=1, method="explain", args=args))[0]
    assert isinstance(reply, Reply) and reply.error is None, reply
    report = reply.result
    return report.get("reason", "complete"), report.get("cause", ""), report.get("seconds_ago")


def test_what_lay_in_lower_tiers_only_is_known_to_be_flushed(tmp_path: Path) -> None:
    served(tmp_path, prompt(1), prompt(2))
    clock = Clock()
    engine = killed(tmp_path, clock=clock)
    clock.now = 10.0
    assert why(engine, prompt(1)) == ("complete", "", None)
    engine.handle(Call(call_id=1, method="flush", args={"tenant": "other"}))
    assert why(engine, prompt(1)) == ("complete", "", None)
    engine.handle(Call(call_id=1, method="flush", args={}))
    clock.now = 25.0
    assert why(engine, prompt(1)) == why(engine, prompt(2)) == ("evicted", "flush", 15.0)
    assert why(engine, prompt(3)) == ("unseen", "", None)
    assert why(engine, prompt(1), salt="s") == ("unseen", "", None)
    ask(engine, prompt(1))
    assert engine.stats()["prefix_cache_misses_total"] == {"evicted": 1}
    assert engine.stats()["evicted_pages_total"] == {"device": 0, "host": 0, "disk": 0}

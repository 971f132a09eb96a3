"""The line in which constraints wait to be prepared is bounded, and what is known passes it."""

import asyncio
import threading

import pytest

from trunkline.api import preparing as module
from trunkline.api.preparing import Preparing
from trunkline.constraint import Constraint
from trunkline.errors import Overloaded
from trunkline.grammar.interface import GrammarRefused
from trunkline.grammar.prepare import Prepared
from trunkline.grammar.prepared_cache import PreparedCache


class SlowCache(PreparedCache):
    """Prepares nothing before `go` is set; `begun` tells that it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def prepare(self, constraint: Constraint, *, unsupported: str = "error") -> Prepared:
        if not self.is_known(constraint):
            self.begun.set()
            self.go.wait()
        return super().prepare(constraint, unsupported=unsupported)


def run(cache: SlowCache, *, most: int, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Send `most` + 1 constraints at once; set `go` once the last has its answer."""
    monkeypatch.setattr(module, "MOST_WAITING", most)

    async def send() -> list[object]:
        preparing = Preparing(cache)
        tasks = [asyncio.create_task(preparing.prepare(Constraint(regex=f"a{number}"))) for number in range(most + 1)]
        await asyncio.wait(tasks[-1:])
        cache.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(send())


def test_more_than_may_wait_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    *prepared, refused = run(SlowCache(), most=3, monkeypatch=monkeypatch)
    assert all(isinstance(one, Prepared) for one in prepared)
    assert isinstance(refused, Overloaded) and refused.retry_after == module.RETRY_SECONDS
    assert refused.message == (
        "3 grammars and schemas wait to be prepared, which is the most that may. Please try again in 5 seconds."
    )


def test_nobody_waits_for_ever_and_there_is_room_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SlowCache()
    monkeypatch.setattr(module, "WAITING_SECONDS", 0.01)
    monkeypatch.setattr(module, "MOST_WAITING", 1)

    async def send() -> None:
        preparing = Preparing(cache)
        with pytest.raises(Overloaded, match=r"'.*' was not prepared within 0\.01 seconds\. Please try again"):
            await preparing.prepare(Constraint(regex="a"))
        cache.go.set()
        monkeypatch.setattr(module, "WAITING_SECONDS", 60.0)
        assert isinstance(await preparing.prepare(Constraint(regex="b")), Prepared)

    asyncio.run(send())


def test_what_is_known_passes_the_line() -> None:
    cache = SlowCache()
    cache.go.set()
    cache.prepare(Constraint(regex="known"))
    cache.go.clear()
    cache.begun.clear()

    async def send() -> None:
        preparing = Preparing(cache)
        slow = asyncio.create_task(preparing.prepare(Constraint(regex="slow")))
        await asyncio.to_thread(cache.begun.wait)
        assert isinstance(await preparing.prepare(Constraint(regex="known")), Prepared)
        assert not slow.done()
        cache.go.set()
        assert isinstance(await slow, Prepared)

    asyncio.run(send())


def test_a_refusal_is_the_callers() -> None:
    cache = SlowCache()
    cache.go.set()
    with pytest.raises(GrammarRefused):
        asyncio.run(Preparing(cache).prepare(Constraint(regex="(")))

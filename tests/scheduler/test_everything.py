"""Everything at once, at random: tenants, salts, groups, pins, drafts, tiers over a bad disk, steps that are lost, flushes, restarts.

Whatever happens, a request that ends has exactly the tokens it has alone, and at the end every page is free or in the tree.
"""

import errno
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.radix.tier_factories import FaultyFiles, ManualIO
from tests.scheduler.factories import EOS, Clock, Driver, generate, plant_drafts
from tests.stub import VOCAB_SIZE, StubWorker, continuation
from trunkline.config import (
    EVICTION_POLICIES,
    POLICIES,
    CacheConfig,
    EngineConfig,
    ModelSource,
    SchedulerConfig,
)
from trunkline.messages import Abort, Call, Generate, Reply
from trunkline.scheduler.engine import Engine
from trunkline.step import Plan, StepResult

EXPECTED_FAILURES = (
    "would be pinned",
    "nothing to keep",
    "shorter than",
    "no whole page",
    "wait",
    "was read",
    "maximum",
)
ACTIONS = (
    *(["arrive"] * 4 + ["group", "group", "warm"]),
    *(["step"] * 8 + ["abort", "unpin", "flush", "look", "tick", "io", "io", "disk"]),
)
TENANTS = ("", "a", "b")


class LostStep(RuntimeError):
    """What the worker raises now and then."""


class Unreliable(StubWorker):
    """Takes time, and loses a share of its steps before or after they ran."""

    def __init__(self, rng: random.Random, clock: Clock, lost: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.rng, self.clock, self.lost = rng, clock, lost

    def submit(self, plan: Plan) -> int:
        self._lose()
        return super().submit(plan)

    def wait(self, handle: int) -> StepResult:
        result = super().wait(handle)
        self.clock.now += self.rng.choice([0.0, 0.001, 0.05, 1.0])
        self._lose()
        return result

    def _lose(self) -> None:
        if self.rng.random() < self.lost:
            raise LostStep


class Life(Driver):
    """One engine, from its start to its end: who asked for what, and who need not get it."""

    def __init__(self, rng: random.Random, bases: list[list[int]], cache: CacheConfig, **worker: Any) -> None:
        self.rng, self.bases = rng, bases
        self.clock, self.io, self.files = Clock(), ManualIO(), FaultyFiles()
        lost = rng.choice([0.0, 0.0, 0.0, 0.03])
        self.worker = Unreliable(rng, self.clock, lost, page_size=cache.block_size, **worker)
        super().__init__(self._engine(cache))
        if self.engine.tiers is not None and self.engine.tiers.disk is not None:
            self.engine.tiers.disk._files = self.files
        if rng.random() < 0.6:
            plant_drafts(self.engine, rng.choice([0.0, 0.5, 1.0]), seed=rng.randrange(100))
        self.asked: dict[str, Generate] = {}
        self.gone: set[str] = set()

    def _engine(self, cache: CacheConfig) -> Engine:
        rng = self.rng
        scheduler = SchedulerConfig(
            policy=rng.choice(POLICIES),
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(6, 40),
            fairness=rng.random() < 0.7,
            target_token_seconds=rng.choice([None, 0.001, 0.02]),
            preemption_mode=rng.choice(["auto", "recompute", *(["swap"] if len(self.worker.host_pages) else [])]),
            num_speculative_tokens=rng.choice([0, 3, 8]),
            window_seconds=rng.choice([20.0, 0.0]),
            max_waiting_requests=rng.choice([4096, 4096, 4]),
        )
        return Engine(
            EngineConfig(model=ModelSource(path="stub"), cache=cache, scheduler=scheduler),
            self.worker,
            eos_token_ids=(EOS,),
            max_model_len=rng.choice([4096, 30]),
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            background=self.io,
        )

    # ---- what happens

    def act(self) -> None:
        """Anything."""
        rng, action = self.rng, self.rng.choice(ACTIONS)
        if action in ("arrive", "group", "warm"):
            self._arrive(action)
        elif action == "abort" and self.engine.scheduler.requests:
            self.gone.add(name := rng.choice(sorted(self.engine.scheduler.requests)))
            self.send(Abort(request_id=name))
        elif action == "unpin":
            for pin in self.call("pins", tenant=None):
                self.call("unpin", tenant=rng.choice([None, *TENANTS]), pin_id=pin["id"])
        elif action == "flush" and rng.random() < 0.3:
            self.call("flush", tenant=rng.choice([None, *TENANTS]), salt=rng.choice([None, "", "s"]))
        elif action == "look":
            self.call("tree", tenant=rng.choice([None, *TENANTS]), depth=3, limit=rng.randint(1, 9), top=2)
            self.call("queue", tenant=None)
            for method in ("explain", "plan"):
                self.call(method, tenant="", salt="", prompt=np.array(self._prompt(), "<i4").tobytes())
        elif action == "tick":
            self.clock.now += rng.choice([0.4, 2.0, 200.0])
        elif action == "io" and self.io.jobs:
            self.io.run(rng.randrange(len(self.io.jobs)))
        elif action == "disk":
            self._spoil()
        else:
            self.step()

    def _prompt(self) -> list[int]:
        """Often one that begins as others did, or goes on where another ended."""
        rng = self.rng
        if self.asked and rng.random() < 0.3:
            name = rng.choice(sorted(self.asked))
            said = self.outcomes[name].tokens if name in self.outcomes else []
            return [*np.frombuffer(self.asked[name].prompt, "<i4").tolist(), *said, rng.randint(1, 3)][: self._room()]
        base = rng.choice(self.bases)[: rng.randint(1, 30)]
        return [*base, *(rng.randint(1, 9) for _ in range(rng.randint(0, 4)))][: self._room()]

    def _room(self) -> int:
        return self.engine.scheduler.max_tokens_per_request - 1

    def _arrive(self, action: str) -> None:
        rng, prompt, number = self.rng, self._prompt(), len(self.asked)
        common: dict[str, Any] = {
            "tenant": rng.choice(TENANTS),
            "salt": rng.choice(["", "", "s"]),
            "priority": rng.randint(-2, 2),
        }
        common["group"] = f"group {number}" if action == "group" else ""
        requests = []
        for choice in range(rng.randint(2, 6) if action == "group" else 1):
            sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "ignore_eos": rng.random() < 0.6}
            if rng.random() < 0.2:
                sampling["stop_token_ids"] = (rng.randrange(VOCAB_SIZE),)
            if rng.random() < 0.1:
                sampling["prompt_logprobs"] = 0
            pin_seconds = rng.choice([0.0] * 8 + [1.0, 100.0])
            if action == "warm":
                sampling, pin_seconds = {"max_tokens": 0}, rng.choice([0.001, 1.0, 100.0])
            request = generate(f"r{number + choice}", prompt, **common, **sampling)
            requests.append(msgspec.structs.replace(request, pin_seconds=pin_seconds, pin_tokens=rng.choice([None, 9])))
        self.asked |= {request.request_id: request for request in requests}
        self.send(*requests)

    def _spoil(self) -> None:
        """Something happens to the disk, or it is well again."""
        rng, files = self.rng, self.files
        files.room = rng.choice([None, None, rng.randint(0, 9000)])
        files.unreadable = rng.choice([None, None, OSError(errno.EIO, "broken")])
        files.unwritable = rng.choice([None, None, OSError(errno.EROFS, "read only")])
        tiers = self.engine.tiers
        segments = sorted(tiers.disk.root.glob("*/*.kv")) if tiers is not None and tiers.disk is not None else []
        if segments:
            file = rng.choice(segments)
            content = bytearray(file.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            file.write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])

    def call(self, method: str, **args: Any) -> Any:
        (reply,) = self.engine.handle(Call(call_id=1, method=method, args=args))
        assert isinstance(reply, Reply) and reply.error is None, reply
        self._audit()
        return reply.result

    def step(self) -> None:
        try:
            super().step()
        except LostStep:
            self._audit()
            ended = {name for name, outcome in self.outcomes.items() if outcome.finished or outcome.failed}
            self.gone |= self.asked.keys() - ended - self.engine.scheduler.requests.keys()

    def _audit(self) -> None:
        """Everything agrees, and no page that a step in flight writes to is free. What it only reads may be: see PrefixCache.release."""
        self.engine.scheduler.check()
        pool = self.engine.scheduler.cache.pool
        free = pool.take(pool.num_free)
        pool.give_back(free)  # they lie as before
        for plan in self.worker.in_flight:
            owner = np.repeat(np.arange(plan.num_requests), np.diff(plan.query_start))
            written = plan.page_table[owner, plan.positions // self.worker.page_size]
            assert not np.isin(written, free).any(), f"step {plan.step} writes to free pages"

    # ---- what comes of it

    def end(self) -> None:
        """Everybody is served; then nothing is held but what is cached."""
        self.drain()
        for name in self.asked.keys() - self.gone:
            self._check_outcome(self.asked[name])
        self.clock.now += 1e6  # all pins have ended
        assert self.call("pins", tenant=None) == []
        self.drain()
        pages = self.engine.stats()["pages"]
        assert pages["free"] + pages["tree"] == self.worker.num_pages, pages

    def _check_outcome(self, request: Generate) -> None:
        outcome, sampling = self.outcomes[request.request_id], request.sampling
        if outcome.failed is not None:
            assert any(words in outcome.failed.message for words in EXPECTED_FAILURES), outcome.failed
            return
        assert outcome.finished is not None
        prompt = np.frombuffer(request.prompt, "<i4").tolist()
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        wanted: list[int] = []
        for token in continuation(prompt, min(sampling.max_tokens or 0, self._room() + 1 - len(prompt))):
            wanted.append(token)
            if token in stops:
                break
        assert outcome.tokens == wanted, request


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_everything_at_once(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    host_slots = rng.choice([0, 1, 3, 20, 64])
    folder: Path | None = tmp_path_factory.mktemp("disk") if host_slots and rng.random() < 0.6 else None
    cache = CacheConfig(
        block_size=rng.choice([1, 2, 4]),
        enable_prefix_caching=bool(host_slots) or rng.random() < 0.9,
        eviction_policy=rng.choice(EVICTION_POLICIES),
        tenant_cache_share=rng.choice([1.0, 0.5, 0.1]),
        max_pinned_share=rng.choice([0.25, 1.0]),
        disk_cache_dir=str(folder) if folder is not None else None,
        disk_cache_size=rng.choice([2**30, 2**13]),
    )
    worker = {
        "num_pages": rng.randint(4, 24),
        "depth": rng.randint(0, 1),
        "host_slots": host_slots,
        "fingerprint": "ab" * 16,
        "poison_token": rng.choice([None, None, None, 5]),
    }
    bases = [[rng.randint(1, 3) for _ in range(40)] for _ in range(3)]
    for _ in range(rng.randint(1, 3) if folder is not None else 1):
        life = Life(rng, bases, cache, **worker)
        for _ in range(rng.randint(3, 40)):
            life.act()
        life.end()

"""Small engines around the stub worker, and drivers for them."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.stub import VOCAB_SIZE, StubWorker, continuation
from trunkline.config import CacheConfig, EngineConfig, GrammarConfig, ModelSource, SchedulerConfig
from trunkline.constraint import Grammar
from trunkline.grammar.interface import Compiler
from trunkline.messages import Failed, Finished, FromEngine, Generate, Tokens
from trunkline.radix.tiers import Background
from trunkline.sampling import SamplingParams
from trunkline.scheduler.engine import Engine
from trunkline.scheduler.process import StatusLine
from trunkline.scheduler.request import Request
from trunkline.step import Plan

EOS = 0


class Clock:
    """Seconds, moved by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    depth: int = 0,
    max_model_len: int = 4096,
    caching: bool = True,
    clock: Clock | None = None,
    poison_token: int | None = None,
    host_slots: int = 0,
    disk_cache_dir: Path | None = None,
    fingerprint: str = "ab" * 16,
    background: Background | None = None,
    grammars: Compiler | None = None,
    forced_tokens: bool = True,
    **scheduler: Any,
) -> Engine:
    """An engine over a StubWorker; `scheduler` are SchedulerConfig's fields."""
    config = EngineConfig(
        model=ModelSource(path="stub"),
        cache=CacheConfig(
            block_size=page_size,
            enable_prefix_caching=caching,
            disk_cache_dir=str(disk_cache_dir) if disk_cache_dir is not None else None,
        ),
        scheduler=SchedulerConfig(**scheduler),
        grammar=GrammarConfig(forced_tokens=forced_tokens),
    )
    worker = StubWorker(
        num_pages=num_pages,
        page_size=page_size,
        depth=depth,
        host_slots=host_slots,
        fingerprint=fingerprint,
        poison_token=poison_token,
    )
    return Engine(
        config,
        worker,
        eos_token_ids=(EOS,),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        clock=clock or Clock(),
        background=background,
        grammars=grammars,
    )


def hold_up_texts(seconds: float, **scheduler: Any) -> None:
    """A status line that watches while a prompt is read beside a text, and each look at the clock finds it so much later."""

    class Ticking(Clock):
        def __call__(self) -> float:
            self.now += seconds
            return self.now

    clock = Ticking()
    engine = make_engine(clock=clock, **scheduler)
    status = StatusLine(engine, 10.0, clock)
    for name, prompt in (("text", [1] * 8), ("prompt", [9] * 100)):
        assert engine.handle(generate(name, prompt, max_tokens=60)) == []
        engine.step()
    while engine.has_work:
        engine.step()
        status.update()


def plans(engine: Engine) -> list[Plan]:
    """Every plan the engine's stub worker was given."""
    assert isinstance(engine.worker, StubWorker)
    return engine.worker.plans


def plant_drafts(engine: Engine, right: float, *, seed: int = 0) -> None:
    """All drafts come from an oracle of the stub, token by token right with this probability."""
    rng = random.Random(seed)

    def find(request: Request, length: int) -> bytes:
        known = request.token_ids(0, request.num_tokens).tolist()
        guess = [token if rng.random() < right else rng.randrange(VOCAB_SIZE) for token in continuation(known, length)]
        return np.array(guess, "<i4").tobytes()

    engine.scheduler.drafter.sources = {"tree": find}


def generate(
    request_id: str,
    prompt: Iterable[int],
    *,
    salt: str = "",
    priority: int = 0,
    group: str = "",
    tenant: str = "",
    grammar: Grammar | None = None,
    **sampling: Any,
) -> Generate:
    """A greedy request of 8 tokens that ignores end-of-text, unless `sampling` says otherwise."""
    fields = {"temperature": 0, "max_tokens": 8, "seed": 0, "ignore_eos": True} | sampling
    return Generate(
        request_id=request_id,
        prompt=np.array(list(prompt), "<i4").tobytes(),
        sampling=SamplingParams(**fields),
        salt=salt,
        priority=priority,
        group=group,
        tenant=tenant,
        grammar=grammar,
    )


def ask(request_id: str, prompt: Iterable[int], grammar: Grammar, **fields: Any) -> Generate:
    """A request under a grammar, that may end by itself."""
    return generate(request_id, prompt, grammar=grammar, **({"ignore_eos": False} | fields))


class Outcome:
    """All that was said about one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.messages: list[FromEngine] = []
        self.finished: Finished | None = None
        self.failed: Failed | None = None
        self.cached_tokens = 0

    def add(self, message: FromEngine) -> None:
        assert self.finished is None and self.failed is None, f"{message} after the last word"
        self.messages.append(message)
        if isinstance(message, Tokens):
            self.tokens += message.token_ids
            self.cached_tokens = message.cached_tokens
        elif isinstance(message, Finished):
            self.finished = message
        elif isinstance(message, Failed):
            self.failed = message


class Driver:
    """Feeds an engine and sorts what it says by request; audits everything after every message and step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[str, Outcome] = {}

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._sort(self.engine.handle(message))
            self._audit()

    def step(self) -> None:
        self._sort(self.engine.step())
        self._audit()

    def _audit(self) -> None:
        """Everything agrees, and no page that a step in flight may touch is free."""
        self.engine.scheduler.check()
        assert isinstance(self.engine.worker, StubWorker)
        pool = self.engine.scheduler.cache.pool
        free = pool.take(pool.num_free)
        pool.give_back(free)  # they lie as before
        for plan in self.engine.worker.in_flight:
            for pages, context_len in zip(plan.page_table, plan.context_len, strict=True):
                used = pages[: -(-context_len // self.engine.worker.page_size)]
                assert not np.isin(used, free).any(), f"step {plan.step} is in flight with free pages"

    def drain(self, max_steps: int = 5000) -> dict[str, Outcome]:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return self.outcomes
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.engine.stats()}")

    def _sort(self, messages: list[FromEngine]) -> None:
        for message in messages:
            assert isinstance(message, Tokens | Finished | Failed)
            self.outcomes.setdefault(message.request_id, Outcome()).add(message)


def run(engine: Engine, *messages: Any) -> dict[str, Outcome]:
    """Send, then step until idle."""
    driver = Driver(engine)
    driver.send(*messages)
    return driver.drain()

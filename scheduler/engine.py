"""The engine: one loop, one writer. It owns the scheduler, the prefix cache and a worker, and speaks messages.

    engine.handle(message)      # Generate, Abort or Call; answers may come at once
    messages = engine.step()    # plan, run, apply; a step may stay in flight (Worker.depth)

Token ids only; no text, no sockets, no processes: `scheduler/process.py` gives it those, `trunkline.LLM` runs it in the caller's.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trunkline.config import EngineConfig
from trunkline.errors import InvalidParameter, RequestError
from trunkline.messages import Abort, Call, Failed, FromEngine, Generate, Reply, ToEngine
from trunkline.radix.cache import PrefixCache
from trunkline.scheduler.scheduler import Scheduler
from trunkline.step import Plan, Worker

logger = logging.getLogger("trunkline.engine")


class StepTotals(msgspec.Struct):
    """Sum and count of something measured every step."""

    sum: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.sum += value
        self.count += 1


class StepInFlight(NamedTuple):
    """A step that the worker was given."""

    handle: Any
    plan: Plan
    submitted_at: float


class Engine:
    """Continues requests, many at once.

    worker         runs the plans
    eos_token_ids  end-of-text ids of the model
    vocab_size     prompts with other token ids are refused
    clock          seconds, monotonic; passed in so that tests and simulations own the time
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self.vocab_size = vocab_size
        self.clock = clock
        cache = PrefixCache(
            num_pages=worker.num_pages, page_size=worker.page_size, enabled=config.cache.enable_prefix_caching
        )
        self.scheduler = Scheduler(config.scheduler, cache, eos_token_ids=eos_token_ids, max_model_len=max_model_len)
        self.step_seconds = StepTotals()
        self.step_tokens = StepTotals()
        self._in_flight: deque[StepInFlight] = deque()
        self._last_applied_at = 0.0
        self._calls: dict[str, Callable[..., Any]] = {"stats": self.stats, "check": self.check, "flush": self.flush}

    # ---------------------------------------------------------------- messages

    def handle(self, message: ToEngine) -> list[FromEngine]:
        """Take one message; an answer to Generate is the last word about it. What is wrong with a request fails only that."""
        match message:
            case Generate():
                return self._generate(message)
            case Abort():
                self.scheduler.abort(message.request_id)
                return []
            case Call():
                return [self._call(message)]

    def _generate(self, message: Generate) -> list[FromEngine]:
        try:
            self._validate(message)
            request = self.scheduler.make_request(
                message.request_id,
                prompt=message.prompt,
                sampling=message.sampling,
                arrival=self.clock(),
                priority=message.priority,
                namespace=("", "", message.salt),
            )
            return self.scheduler.add(request)
        except RequestError as error:
            return [_failed(message.request_id, error)]

    def _validate(self, message: Generate) -> None:
        """Everything a request could break the engine with; the API process has checked it before."""
        if message.request_id in self.scheduler.requests:
            raise InvalidParameter(f"A request with id {message.request_id!r} is running; ids must be unique.")
        if not message.prompt:
            raise InvalidParameter("The prompt is empty; it must have at least one token.", param="prompt")
        if len(message.prompt) % 4:
            raise InvalidParameter.of("prompt", f"{len(message.prompt)} bytes", "at least one token id of 4 bytes")
        prompt = np.frombuffer(message.prompt, "<i4")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            bad = prompt[(prompt < 0) | (prompt >= self.vocab_size)][0]
            raise InvalidParameter.of("prompt", int(bad), f"token ids from 0 to {self.vocab_size - 1}")
        message.sampling.check_vocabulary(self.vocab_size)

    def _call(self, message: Call) -> Reply:
        call = self._calls.get(message.method)
        if call is None:
            known = ", ".join(sorted(self._calls))
            return Reply(call_id=message.call_id, error=f"There is no method {message.method!r}; there are {known}.")
        try:
            return Reply(call_id=message.call_id, result=call(**message.args))
        except (TypeError, AssertionError, RequestError) as error:
            return Reply(call_id=message.call_id, error=f"{message.method} failed: {error}")

    # ---------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """True if `step` would do something."""
        return self.scheduler.has_work

    def step(self) -> list[FromEngine]:
        """Plan a step and hand it to the worker; then apply the oldest one in flight, unless the worker can hold another.

        Raises what the worker raises. Requests of that step are gone then; the others, and the engine, can go on.
        """
        if len(self._in_flight) > self.worker.depth:  # left over by a step whose waiting was interrupted
            return self._apply_oldest()
        plan = self.scheduler.schedule(self.clock())
        if plan is not None:
            try:
                handle = self.worker.submit(plan)
            except Exception:
                self.scheduler.lose(plan.step, submitted=False)
                raise
            self._in_flight.append(StepInFlight(handle, plan, self.clock()))
        if plan is not None and len(self._in_flight) <= self.worker.depth:
            return []
        return self._apply_oldest()

    def _apply_oldest(self) -> list[FromEngine]:
        if not self._in_flight:
            return []
        # It stays there if the waiting is interrupted (Ctrl-C, an alarm): the step itself runs on.
        step = self._in_flight[0]
        try:
            result = self.worker.wait(step.handle)
        except Exception:
            self._in_flight.popleft()
            self.scheduler.lose(step.plan.step, submitted=True)
            raise
        self._in_flight.popleft()
        started_at = max(step.submitted_at, self._last_applied_at)  # it may have waited for the step before it
        self._last_applied_at = self.clock()
        seconds = self._last_applied_at - started_at
        self.step_seconds.add(seconds)
        self.step_tokens.add(step.plan.num_tokens)
        self.scheduler.order.observe(step.plan.num_tokens, seconds)
        return self.scheduler.apply(result, self._last_applied_at)

    # ---------------------------------------------------------------- calls

    def stats(self) -> dict[str, Any]:
        """Counters since start and gauges of now, for /metrics and the status line."""
        scheduler, counters, pages = self.scheduler, self.scheduler.counters, self.scheduler.cache.stats()
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_cache_usage": 1 - scheduler.cache.available / scheduler.cache.num_pages,
            "pages": {
                "free": pages.free,
                "tree": pages.tree_evictable + pages.tree_locked,
                "lease": pages.leased,
                "copy": pages.in_flight,
            },
            "prompt_tokens_total": counters.prompt_tokens,
            "prompt_tokens_computed_total": counters.prompt_tokens_computed,
            "generation_tokens_total": counters.generation_tokens,
            "prefix_cache_queries_total": counters.prefix_cache_queries,
            "prefix_cache_hits_total": counters.prefix_cache_hits,
            "num_preemptions_total": counters.preemptions,
            "evicted_pages_total": pages.evicted_pages_total,
            "step_seconds": msgspec.to_builtins(self.step_seconds),
            "step_tokens": msgspec.to_builtins(self.step_tokens),
        }

    def check(self) -> dict[str, Any]:
        """Audit requests, leases, tree and pool; the Reply carries an error if they disagree."""
        self.scheduler.check()
        return {"ok": True}

    def flush(self) -> dict[str, Any]:
        """Drop every cached prefix that no request holds."""
        return {"pages": self.scheduler.cache.flush()}


def _failed(request_id: str, error: RequestError) -> Failed:
    return Failed(
        request_id=request_id,
        message=error.message,
        status=error.status,
        type=error.type,
        code=error.code,
        param=error.param,
    )

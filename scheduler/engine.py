"""The engine: one loop, one writer. It owns the scheduler, the prefix cache and a worker, and speaks messages.

    engine.handle(message)      # Generate, Abort or Call; answers may come at once
    messages = engine.step()    # plan, run, apply; a step may stay in flight (Worker.depth)

Token ids only; no text, no sockets, no processes: `scheduler/process.py` gives it those, `trunkline.LLM` runs it in the
caller's.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trunkline.config import POOLINGS, EngineConfig
from trunkline.errors import InvalidParameter, RequestError
from trunkline.grammar.interface import Compiler
from trunkline.messages import Abort, Call, FromEngine, Generate, Reply, ToEngine, Totals
from trunkline.radix.cache import PrefixCache
from trunkline.radix.document_order import DocumentOrder
from trunkline.radix.events import Namespace
from trunkline.radix.tiers import Background, Tiers
from trunkline.scheduler.administration import Administration, Later
from trunkline.scheduler.delivery import failed_message
from trunkline.scheduler.scheduler import Scheduler
from trunkline.scheduler.tiering import open_tiers
from trunkline.step import PageCopy, Plan, Worker, mask_words

logger = logging.getLogger("trunkline.engine")

LONGEST_DELIVERY = 300.0  # seconds between a request's arrival and its message's: more is not believed
SAVING_SECONDS = 3.0  # for what is brought to disk at the end: whoever ends the process waits no more than five
LEAST_CLOSING_SECONDS = 0.5  # of these, for what is being written
# Bounds that steps are counted by: a GPU's decode step takes milliseconds, a CPU's full chunk of a prompt a second.
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# A step that reads so much of a prompt while texts are under way, and takes so long, is worth a word.
NOTICED_SECONDS = 0.5
NOTICED_TOKENS = 64
READING_SECONDS = 0.01  # how long a step may wait for the disk, or for a grammar, if there is nothing to compute


class StepInFlight(NamedTuple):
    """A step that the worker was given."""

    handle: Any
    plan: Plan
    submitted_at: float


class LateReply(NamedTuple):
    """A call that is not answered yet."""

    call_id: int
    result: Later


class Engine:
    """Continues requests, many at once.

    worker         runs the plans
    eos_token_ids  end-of-text ids of the model
    vocab_size     prompts with other token ids are refused
    clock          seconds, monotonic; passed in so that tests and simulations own the time
    background     runs the disk tier's reads and writes; None: threads
    grammars       compiles what texts must follow, and is closed with the engine; None: such requests are refused
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
        background: Background | None = None,
        grammars: Compiler | None = None,
    ) -> None:
        self.worker = worker
        self.vocab_size = vocab_size
        self.clock = clock
        cache = PrefixCache(
            num_pages=worker.num_pages,
            page_size=worker.page_size,
            enabled=config.cache.enable_prefix_caching,
            eviction_policy=config.cache.eviction_policy,
            tenant_share=config.cache.tenant_cache_share,
            max_pinned_share=config.cache.max_pinned_share,
        )
        copies: list[PageCopy] = []
        self.tiers = open_tiers(config.cache, config.scheduler, worker, copies, background)
        self._weights = worker.fingerprint
        self.scheduler = Scheduler(
            config.scheduler,
            cache,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            copies=copies,
            tiers=self.tiers,
            grammars=grammars,
            grammar_config=config.grammar,
        )
        self.grammars = grammars
        self.step_seconds = Totals.within(*STEP_SECONDS)
        self.step_tokens = Totals.within(*STEP_TOKENS)
        self.longest_hold_up = 0.0  # seconds that texts under way waited while prompts were read; 0: not noticeably
        self._in_flight: deque[StepInFlight] = deque()
        self._late: list[LateReply] = []
        self._last_applied_at = 0.0
        self._closed = False
        self._document_order = DocumentOrder(cache.tree)
        self._calls: dict[str, Callable[..., Any]] = {
            "stats": self.stats,
            "check": self.check,
            "order_documents": self.order_documents,
            **Administration(self.scheduler, self.namespace, clock).calls,
        }

    # ---------------------------------------------------------------- messages

    def handle(self, message: ToEngine) -> list[FromEngine]:
        """Take one message; an answer to Generate is the last word about it. A bad request fails alone."""
        match message:
            case Generate():
                return self._generate(message)
            case Abort():
                self.scheduler.abort(message.request_id)
                return []
            case Call():
                reply = self._call(message)
                return [] if reply is None else [reply]

    def namespace(self, tenant: str, salt: str) -> Namespace:
        """Whose KV a request's is."""
        return Namespace(weights=self._weights, tenant=tenant, salt=salt)

    def _generate(self, message: Generate) -> list[FromEngine]:
        try:
            self._validate(message)
            allowed = message.sampling.allowed_token_ids
            request = self.scheduler.make_request(
                message.request_id,
                prompt=message.prompt,
                sampling=message.sampling,
                arrival=self._arrival(message),
                priority=message.priority,
                namespace=self.namespace(message.tenant, message.salt),
                group=message.group,
                pin_seconds=message.pin_seconds,
                pin_tokens=message.pin_tokens,
                grammar=message.grammar,
                pooling=message.pooling,
                allowed=None if allowed is None else mask_words(allowed, self.vocab_size),
                bad_words=message.bad_words,
            )
            return self.scheduler.add(request)
        except RequestError as error:
            return [failed_message(message.request_id, error)]

    def _arrival(self, message: Generate) -> float:
        """When the request arrived: as its sender says, if that can be; it may have waited here for a step to end."""
        now = self.clock()
        return now if message.arrival is None else min(max(message.arrival, now - LONGEST_DELIVERY), now)

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
        self._validate_words(message)
        if message.pooling and (message.pooling not in POOLINGS or message.sampling.max_tokens != 0 or message.grammar):
            raise InvalidParameter.of(
                "pooling", message.pooling, f"one of {', '.join(POOLINGS)}, without tokens to generate"
            )

    def _validate_words(self, message: Generate) -> None:
        """What may be chosen and what may not leave something."""
        for ids in message.bad_words:
            if not ids or min(ids) < 0 or max(ids) >= self.vocab_size:
                raise InvalidParameter.of("bad_words", ids, f"words of token ids from 0 to {self.vocab_size - 1}")
        sampling = message.sampling
        if sampling.allowed_token_ids is None:
            return
        left = set(sampling.allowed_token_ids) - {ids[0] for ids in message.bad_words if len(ids) == 1}
        if sampling.min_tokens:
            left -= self.scheduler.eos_token_ids.union(sampling.stop_token_ids)
        if not left:
            raise InvalidParameter(
                "'allowed_token_ids' holds only ids that 'bad_words' or 'min_tokens' forbid; allow others, or leave those out.",
                param="allowed_token_ids",
            )

    def _call(self, message: Call) -> Reply | None:
        """None: what is asked takes time, and one of the next steps answers."""
        call = self._calls.get(message.method)
        if call is None:
            known = ", ".join(sorted(self._calls))
            return Reply(call_id=message.call_id, error=f"There is no method {message.method!r}; there are {known}.")
        try:
            result = call(**message.args)
            if isinstance(result, Later):
                self._late.append(LateReply(message.call_id, result))
                return None
            return Reply(call_id=message.call_id, result=result)
        except (TypeError, AssertionError, RequestError) as error:
            return Reply(call_id=message.call_id, error=f"{message.method} failed: {error}")

    def _late_replies(self) -> list[FromEngine]:
        """Answers that are known by now."""
        done = [late for late in self._late if late.result.done]
        self._late = [late for late in self._late if late not in done]
        return [Reply(call_id=late.call_id, result=late.result.result()) for late in done]

    # ---------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """True if `step` would do something."""
        return self.scheduler.has_work or bool(self._late)

    def step(self) -> list[FromEngine]:
        """Plan a step and hand it to the worker; then apply the oldest one in flight, unless it can hold more.

        Raises what the worker raises. Requests of that step are gone then; the others, and the engine, can go on.
        """
        if len(self._in_flight) > self.worker.depth:  # left over by a step whose waiting was interrupted
            return self._apply_oldest()
        messages = self.scheduler.poll() + self._late_replies()
        plan = self.scheduler.schedule(self.clock())
        if plan is not None:
            self._submit(plan)
        if plan is not None and len(self._in_flight) <= self.worker.depth:
            return messages
        if plan is None and not self._in_flight:
            self._wait()
        return messages + self._apply_oldest()

    def _submit(self, plan: Plan) -> None:
        """Give the worker a step, and fill its masks while it computes."""
        try:
            handle = self.worker.submit(plan)
        except Exception:
            self.scheduler.lose(plan.step, submitted=False)
            raise
        self._in_flight.append(StepInFlight(handle, plan, self.clock()))
        self.scheduler.fill_masks(plan.step)

    def _wait(self) -> None:
        """Nothing can be computed, but somebody may wait for a grammar, or for the disk, and for nothing else."""
        if self.scheduler.constraints.any_pending or self._late:
            self.scheduler.constraints.wait(READING_SECONDS)
        elif self.tiers is not None:
            self.tiers.wait(READING_SECONDS)

    def close(self) -> None:
        """Bring to disk what is to outlive the process, within some seconds, and free the device. Idempotent.

        Requests are aborted.
        """
        if self.tiers is not None and not self._closed:
            self._closed = True
            deadline = self.clock() + SAVING_SECONDS
            try:
                self._save(self.tiers, deadline)
            except Exception:
                logger.exception("Not all that should be on disk could be brought there; it will be computed again.")
            self.tiers.close(max(LEAST_CLOSING_SECONDS, deadline - self.clock()))
        if self.grammars is not None:
            self.grammars.close()
        self.worker.close()

    def _save(self, tiers: Tiers, deadline: float) -> None:
        for request_id in list(self.scheduler.requests):
            self.scheduler.abort(request_id)
        while self._in_flight:
            self._apply_oldest()
        for _ in chain((0,), self.scheduler.tiering.save()):  # first what was on its way already
            while self.has_work or tiers.is_writing:
                if self.clock() >= deadline:
                    return
                self.step()
                tiers.wait_for_writes(READING_SECONDS)

    def _apply_oldest(self) -> list[FromEngine]:
        if not self._in_flight:
            return []
        # It stays there if the waiting is interrupted (Ctrl-C): the step runs on, or will run again.
        step = self._in_flight[0]
        try:
            result = self.worker.wait(step.handle)
        except Exception:
            self._in_flight.popleft()
            self.scheduler.lose(step.plan.step, submitted=True)
            self.scheduler.fill_late_masks()
            raise
        self._in_flight.popleft()
        started_at = max(step.submitted_at, self._last_applied_at)  # it may have waited for the step before it
        self._last_applied_at = self.clock()
        seconds = self._last_applied_at - started_at
        self.step_seconds.add(seconds)
        if step.plan.num_tokens:
            self.step_tokens.add(step.plan.num_tokens)
        # Rows whose logits are wanted cost the same whether they follow a token or a draft of it.
        generating = {row.at: row.position - 1 for row in step.plan.rows if row.sampling is not None}
        context = int(step.plan.positions.sum(dtype=np.int64)) - sum(generating.values())
        num_generating = len(generating)
        self.scheduler.pace.observe(step.plan.num_tokens - num_generating, num_generating, seconds, context)
        if seconds > max(NOTICED_SECONDS, self.longest_hold_up):
            lengths = np.diff(step.plan.query_start)
            if lengths.size and lengths.min() == 1 and lengths.max() >= NOTICED_TOKENS:
                self.longest_hold_up = seconds
        messages = self.scheduler.apply(result, self._last_applied_at)
        self.scheduler.fill_late_masks()
        return messages

    # ---------------------------------------------------------------- calls

    def stats(self) -> dict[str, Any]:
        """Counters since start and gauges of now, for /metrics and the status line."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        scheduler.cache.tick(self.clock())  # an idle engine takes no steps, and its pins end all the same
        pages = scheduler.cache.stats()
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
            "spec_decode_num_draft_tokens_total": dict(counters.draft_tokens),
            "spec_decode_num_accepted_tokens_total": dict(counters.accepted_tokens),
            "prefix_cache_queries_total": counters.prefix_cache_queries,
            "prefix_cache_hits_total": dict(counters.hits_by_tier),
            "prefix_cache_misses_total": dict(scheduler.admission.reports.misses),
            "pinned_pages": pages.pinned,
            "num_preemptions_total": dict(counters.preemptions_by_way),
            "evicted_pages_total": {"device": pages.evicted_pages_total}
            | (self.tiers.evicted_pages_total if self.tiers is not None else {}),
            "tier_usage": {"device": 1 - pages.free / scheduler.cache.num_pages}
            | (self.tiers.usage if self.tiers is not None else {}),
            "tier_errors_total": self.tiers.errors if self.tiers is not None else {},
            "step_seconds": msgspec.to_builtins(self.step_seconds),
            "step_tokens": msgspec.to_builtins(self.step_tokens),
            **scheduler.constraints.stats(),
        }

    def check(self) -> dict[str, Any]:
        """Audit requests, leases, tree and pool; the Reply carries an error if they disagree."""
        self.scheduler.check()
        return {"ok": True}

    def order_documents(
        self, tenant: str, salt: str, head: bytes, documents: list[bytes], glue: list[bytes], count: bool = True
    ) -> list[int]:
        """In which order a prompt should show its documents (radix/document_order.py); tokens as bytes of int32."""
        namespace = self.namespace(tenant, salt)
        return self._document_order.choose(namespace, head, documents, glue=glue, count=count)

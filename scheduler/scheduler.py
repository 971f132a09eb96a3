"""The scheduler: decides what each step computes, and applies what it chose.

One idea: a request has known tokens, and computed tokens trail them (scheduler/request.py). A step lets every running request
catch up as far as the token budget goes; generating is catching up by one.

    scheduler.add(request)            # QUEUE: refused at once if it can never fit
    plan = scheduler.schedule(now)    # PLAN:  running requests first, then admissions in queue order
    messages = scheduler.apply(plan's StepResult, now)

It knows no text, no tensors, no clock and no process: time is passed in, pages belong to the prefix cache.
"""

from typing import NamedTuple

from trunkline.config import SchedulerConfig
from trunkline.messages import Failed, Finished, FromEngine, TokenLogprobs, Tokens
from trunkline.radix.cache import Match, PrefixCache
from trunkline.radix.events import Namespace
from trunkline.radix.tree import TOKEN_BYTES, Node
from trunkline.sampling import SamplingParams
from trunkline.scheduler.planner import Piece, PlanBuilder
from trunkline.scheduler.policy import QueueOrder
from trunkline.scheduler.request import Request, State
from trunkline.step import Plan, RowLogprobs, StepResult

# Waiting requests whose look-up is renewed in a step. Those behind keep the key of their last look-up.
NUM_CANDIDATES = 64
# A request preempted this often is no longer chosen as a victim while another can be.
MAX_PREEMPTIONS = 3


class NextPage(NamedTuple):
    """A page that is not in the tree yet: two requests whose next pages are equal would compute the same one."""

    parent: Node  # the prefix it continues, namespace included
    tokens: bytes


class Counters:
    """Totals since start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prompt_tokens_computed = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0  # tokens looked up at admission
        self.prefix_cache_hits = 0  # tokens found
        self.preemptions = 0


class Scheduler:
    """Continuous batching over a prefix cache.

    eos_token_ids   end-of-text ids of the model
    max_model_len   tokens, prompt and output together
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        self.config = config
        self.cache = cache
        self.order = QueueOrder(config)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # in order of admission
        self.counters = Counters()
        self.now = 0.0  # seconds, as last told
        self.last_step = 0  # newest step submitted
        self._pieces: dict[int, list[Piece]] = {}  # by step in flight
        self._num_arrived = 0

    # ---------------------------------------------------------------- queue

    @property
    def max_tokens_per_request(self) -> int:
        """Prompt and output of one request: bounded by the model and by the whole cache."""
        return min(self.max_model_len, self.cache.num_pages * self.cache.page_size)

    def make_request(
        self,
        request_id: str,
        *,
        prompt: bytes,
        sampling: SamplingParams,
        arrival: float,
        priority: int = 0,
        namespace: Namespace = ("", "", ""),
    ) -> Request:
        """A Request numbered in order of arrival and limited by the model and the cache."""
        self._num_arrived += 1
        return Request(
            request_id,
            prompt=prompt,
            sampling=sampling,
            arrival=arrival,
            order=self._num_arrived,
            priority=priority,
            namespace=namespace,
            limit=self.max_tokens_per_request,
        )

    def add(self, request: Request) -> list[FromEngine]:
        """Queue a request; one that has nothing to compute is finished at once.

        Raises ContextLengthExceeded if prompt and one token can never fit.
        """
        num_cache_tokens = self.cache.num_pages * self.cache.page_size
        request.sampling.check_length(
            request.num_prompt, max_model_len=self.max_model_len, num_cache_tokens=num_cache_tokens
        )
        self.counters.prompt_tokens += request.num_prompt
        self.requests[request.request_id] = request
        if request.num_to_plan <= 0 or (not request.wants_token and not request.wants_prompt_logprobs):
            return self._finish(request, "length")
        self._enqueue(request)
        return []

    def _enqueue(self, request: Request) -> None:
        """Wait for admission. The first look-up is made here: however long the queue, no order takes a warm prompt for cold."""
        request.state = State.WAITING
        request.match = self._look_up(request)
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request in whatever state it is. Unknown and finished ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request)

    @property
    def has_work(self) -> bool:
        """True if `schedule` may find something to do, or a step is in flight."""
        return bool(self.waiting or self.running or self._pieces)

    # ---------------------------------------------------------------- plan

    def schedule(self, now: float) -> Plan | None:
        """The next step, or None if nothing can be computed now. `now` in seconds, on the clock of `make_request`'s `arrival`.

        1. Running requests catch up: those that generate first (one token each), then prompts in order of arrival.
        2. If no page was short, waiting requests are admitted in queue order while budget and pages last.
        """
        self.now = now
        builder = PlanBuilder(self.last_step + 1, self.eos_token_ids)
        pieces: list[Piece] = []
        if self._plan_running(builder, pieces):
            self._plan_admissions(builder, pieces)
        if not pieces:
            return None
        plan = builder.build(self.cache.page_size)
        self.last_step += 1
        self._pieces[self.last_step] = pieces
        for piece in pieces:
            piece.request.num_planned = piece.end
            if piece.row is not None:
                piece.request.num_in_flight += 1
                piece.request.row_in_flight = piece.row
        return plan

    def _plan_running(self, builder: PlanBuilder, pieces: list[Piece]) -> bool:
        """Let running requests catch up. Returns False if pages were short.

        Budget goes to those that generate first; pages go to the most urgent first, so that victims are always the least urgent.
        """
        num_new: dict[str, int] = {}
        budget = self.config.max_num_batched_tokens
        by_budget = sorted(self.running, key=lambda r: (r.num_to_plan > 1, *self._urgency(r)))
        for request in by_budget:
            num_new[request.request_id] = min(request.num_to_plan, budget)
            budget -= num_new[request.request_id]
        enough = True
        served: set[str] = set()
        for request in sorted(self.running, key=self._urgency):
            n = num_new[request.request_id]
            if n > 0 and request.state is State.RUNNING:
                if self._make_room(request, request.num_planned + n):
                    served.add(request.request_id)
                else:
                    enough = False
        for request in by_budget:
            if request.state is not State.RUNNING:
                enough = False  # it was preempted
            elif request.request_id in served:
                pieces.append(builder.add(request, num_new[request.request_id]))
        return enough

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Pages for the first `num_tokens` of a running request, preempting the least urgent (as the last resort, itself)."""
        assert request.lease is not None
        while True:
            missing = self._num_pages(num_tokens) - request.lease.num_pages
            if missing <= 0 or self.cache.grow(request.lease, missing):
                return True
            if self.cache.in_flight:
                return False  # pages come back when the step in flight is done: wait rather than preempt more
            victim = max(self.running, key=lambda r: (r.num_preemptions < MAX_PREEMPTIONS, *self._urgency(r)))
            self._preempt(victim)
            if victim is request:
                return False

    def _urgency(self, request: Request) -> tuple[int, int]:
        """Smaller is more urgent: the lowest priority, then the latest arrival, is preempted first."""
        priority = request.priority if self.config.policy == "priority" else 0
        return priority, request.order

    def _preempt(self, request: Request) -> None:
        """Give the request's pages back. Those it computed are in the tree: resuming finds them again unless they are evicted."""
        self._release(request)
        self.running.remove(request)
        request.num_preemptions += 1  # a piece in flight is stale now: what it chooses is chosen again, the same token
        request.reset_progress()
        self._enqueue(request)
        self.counters.preemptions += 1

    def _plan_admissions(self, builder: PlanBuilder, pieces: list[Piece]) -> None:
        """Admit waiting requests in queue order, until one does not fit.

        A request whose next page is just being computed by another waits for it (one step at a time, so at most until the other
        has read its prompt): the same prefix is computed once.
        """
        full = builder.num_tokens >= self.config.max_num_batched_tokens or len(self.running) >= self.config.max_num_seqs
        if full or not self.waiting:
            return
        being_computed = {self._next_page(request) for request in self.running} - {None}
        for request in self._candidates():
            budget = self.config.max_num_batched_tokens - builder.num_tokens
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                break
            if self._next_page(request) in being_computed:
                continue
            if not self._admit(request):
                break
            being_computed |= {self._next_page(request)} - {None}
            pieces.append(builder.add(request, min(request.num_to_plan, budget)))

    def _candidates(self) -> list[Request]:
        """The first waiting requests in queue order, with fresh look-ups."""
        self.waiting.sort(key=self.order.key)
        candidates = self.waiting[:NUM_CANDIDATES]
        for request in candidates:
            request.match = self._look_up(request)
        candidates.sort(key=self.order.key)
        return candidates

    def _look_up(self, request: Request) -> Match:
        limit = 0 if request.wants_prompt_logprobs else None
        return self.cache.match(request.namespace, bytes(request.tokens), request.num_tokens, limit=limit)

    def _next_page(self, request: Request) -> NextPage | None:
        """The whole page that the request computes next, running or once admitted; None if it would not be shared.

        A waiting request computes its last token in any case, so the page of that token is of no use to it.
        """
        if request.lease is not None:
            node, num_shareable = request.lease.node, request.num_tokens
        else:
            assert request.match is not None
            node, num_shareable = request.match.node, 0 if request.wants_prompt_logprobs else request.num_tokens - 1
        start, end = node.depth * self.cache.page_size, (node.depth + 1) * self.cache.page_size
        if end > num_shareable or not self.cache.enabled:
            return None
        return NextPage(node, bytes(request.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]))

    def _admit(self, request: Request) -> bool:
        """Lease the pages of all known tokens and of the next one. A failure changes nothing.

        One page more must be free if others run, so that the newcomer does not preempt somebody in its first steps.
        """
        assert request.match is not None
        if not self.cache.is_valid(request.match):  # an admission in this step evicted some of it
            request.match = self._look_up(request)
        num_new = self._num_pages(min(request.num_tokens + 1, request.limit)) - request.match.num_pages
        if self.running and self.cache.available < num_new + 1:
            return False
        lease = self.cache.admit(request.match, num_new)
        if lease is None:
            return False
        cached = request.match.num_tokens
        request.lease = lease
        request.num_computed = request.num_planned = cached
        self.counters.prefix_cache_queries += request.num_tokens
        self.counters.prefix_cache_hits += cached
        if request.cached_tokens is None:
            request.cached_tokens = min(cached, request.num_prompt)
            request.admitted_at = self.now
        request.match = None
        request.state = State.RUNNING
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.page_size)

    # ---------------------------------------------------------------- apply

    def apply(self, result: StepResult, now: float) -> list[FromEngine]:
        """Take in what a finished step computed and chose; returns what the callers are told."""
        self.now = now
        messages: list[FromEngine] = []
        pieces = self._pieces.pop(result.step)
        self.cache.step_done(result.step)
        for piece in pieces:
            request = piece.request
            self.counters.prompt_tokens_computed += max(0, min(piece.end, request.num_prompt) - piece.start)
            if request.state is State.FINISHED or piece.num_preemptions != request.num_preemptions:
                continue
            failure = next((result.failed[row] for row in piece.rows if row in result.failed), None)
            if failure is not None:
                self._end(request)
                messages.append(Failed(request_id=request.request_id, message=failure))
                continue
            self._advance(piece, result)
            messages += self._deliver(piece, result)
        return messages

    def lose(self, step: int, *, submitted: bool) -> None:
        """A step has failed as a whole: forget who took part in it, for nobody knows what was written."""
        pieces = self._pieces.pop(step)
        if submitted:
            self.cache.step_done(step)
        else:
            self.last_step -= 1  # it never ran, so nothing waits for it; the one before it may still be in flight
        for piece in pieces:
            request = piece.request
            if request.state is not State.FINISHED and piece.num_preemptions == request.num_preemptions:
                self._end(request)

    def _advance(self, piece: Piece, result: StepResult) -> None:
        """The piece's KV is written: count it and publish whole pages."""
        request = piece.request
        request.num_computed = piece.end
        request.prompt_logprobs += [_token_logprobs(result.logprobs[row]) for row in piece.prompt_rows]
        self._publish(request)

    def _deliver(self, piece: Piece, result: StepResult) -> list[FromEngine]:
        """The token the piece chose, and the end of the request if that is it."""
        request = piece.request
        if piece.row is None:
            if request.limit > request.num_prompt or request.wants_prompt_logprobs:
                return []  # more of the prompt is to come
            return [self._tokens(request, [], None), *self._finish(request, "length")]
        token_id = int(result.token_ids[piece.row])
        request.append(token_id)
        request.num_in_flight -= 1
        self.counters.generation_tokens += 1
        messages: list[FromEngine] = [self._tokens(request, [token_id], result.logprobs[piece.row])]
        if request.num_output >= request.sampling.min_tokens and self._stops(request, token_id):
            return messages + self._finish(request, "stop", stop_token_id=token_id)
        if request.num_tokens >= request.limit:
            return messages + self._finish(request, "length")
        return messages

    def _stops(self, request: Request, token_id: int) -> bool:
        if token_id in request.sampling.stop_token_ids:
            return True
        return token_id in self.eos_token_ids and not request.sampling.ignore_eos

    def _tokens(self, request: Request, token_ids: list[int], logprobs: RowLogprobs | None) -> Tokens:
        prompt_logprobs = None
        if not request.prompt_logprobs_sent:
            prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
            request.prompt_logprobs_sent = True
        first = request.num_output == 1
        return Tokens(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=[_token_logprobs(logprobs)] if logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=request.cached_tokens or 0,
            queue_seconds=request.admitted_at - request.arrival if first else None,
            prefill_seconds=self.now - request.admitted_at if first else None,
        )

    # ---------------------------------------------------------------- pages

    def _publish(self, request: Request) -> None:
        """Give the tree every whole page that is computed."""
        lease = request.lease
        assert lease is not None
        if request.num_computed // self.cache.page_size > lease.num_shared:
            self.cache.commit(lease, bytes(request.tokens), request.num_computed, after_step=self.last_step)

    def _release(self, request: Request) -> None:
        """Give back the lease. What is not published by now never is; pages a step in flight may touch return after it."""
        if request.lease is None:
            return
        self.cache.release(request.lease, after_step=self.last_step)
        request.lease = None

    def _end(self, request: Request) -> None:
        """Out of every list, holding nothing."""
        self._release(request)
        if request.state is State.WAITING and request in self.waiting:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
        request.state = State.FINISHED
        request.match = None
        del self.requests[request.request_id]

    def _finish(self, request: Request, reason: str, stop_token_id: int | None = None) -> list[FromEngine]:
        self._end(request)
        return [
            Finished(
                request_id=request.request_id,
                reason=reason,
                stop_token_id=stop_token_id,
                prompt_tokens=request.num_prompt,
                cached_tokens=request.cached_tokens or 0,
                completion_tokens=request.num_output,
            )
        ]

    def check(self) -> None:
        """Raise AssertionError if requests, leases and pages disagree. Cheap enough for every idle moment; used in tests."""
        self.cache.check()
        for request in self.requests.values():
            held = request.lease is not None and not request.lease.released
            assert held == (request.state is State.RUNNING), (
                f"{request.request_id} is {request.state} with lease {request.lease}"
            )
            assert (request.match is not None) == (request.state is State.WAITING), f"{request.request_id}: no look-up"
            assert request.num_computed <= request.num_planned <= request.num_tokens + request.num_in_flight
            if request.lease is not None:
                shared, room = (n * self.cache.page_size for n in (request.lease.num_shared, request.lease.num_pages))
                assert shared <= request.num_computed and request.num_planned <= room, (
                    f"{request.request_id} has {shared} tokens shared, {request.num_computed} computed,"
                    f" {request.num_planned} planned, and pages for {room}"
                )
        assert len(self.waiting) + len(self.running) == len(self.requests)
        if not self.requests and not self._pieces:
            stats = self.cache.stats()
            assert stats.leased == stats.tree_locked == stats.in_flight == 0, f"idle, yet pages are held: {stats}"


def _token_logprobs(row: RowLogprobs | None) -> TokenLogprobs:
    assert row is not None
    return TokenLogprobs(row.token_ids.tolist(), row.logprobs.tolist(), row.rank)

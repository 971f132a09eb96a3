"""The scheduler: decides what each step computes, and applies what it chose.

One idea: a request has known tokens, and computed tokens trail them (scheduler/request.py). A step lets every running
request catch up as far as the token budget goes; generating is catching up by one.

    scheduler.add(request)            # QUEUE: refused at once if it can never fit
    plan = scheduler.schedule(now)    # PLAN:  running requests first, then admissions in queue order
    messages = scheduler.apply(plan's StepResult, now)

It knows no text, no tensors, no clock and no process: time is passed in, pages belong to the prefix cache.
"""

from dataclasses import replace
from typing import Unpack

from trunkline.config import GrammarConfig, SchedulerConfig
from trunkline.grammar.interface import Compiler
from trunkline.messages import Failed, FromEngine
from trunkline.radix.cache import PrefixCache
from trunkline.radix.reuse import ReuseEstimator
from trunkline.radix.tiers import Tiers
from trunkline.radix.tree import TOKEN_BYTES
from trunkline.sampling import SamplingParams
from trunkline.scheduler.admission import Admission
from trunkline.scheduler.audit import audit_idle, audit_request
from trunkline.scheduler.constraints import Constraints
from trunkline.scheduler.counters import Counters
from trunkline.scheduler.delivery import (
    Chosen,
    chosen,
    failed_message,
    finished_message,
    token_logprobs,
    tokens_message,
)
from trunkline.scheduler.drafts import Drafter
from trunkline.scheduler.fairness import BURST_STEPS, Fairness
from trunkline.scheduler.fork import Groups
from trunkline.scheduler.grouping import Grouping
from trunkline.scheduler.masks import StepMasks
from trunkline.scheduler.pace import Pace
from trunkline.scheduler.pinning import check_pin, pin_prompt
from trunkline.scheduler.planner import NO_TOKENS, Piece, PlanBuilder
from trunkline.scheduler.preemption import Urgency, choose_victim
from trunkline.scheduler.request import Request, State, Wishes
from trunkline.scheduler.shares import Shares, completes, max_step_tokens
from trunkline.scheduler.tiering import Tiering
from trunkline.scheduler.turns import Turns
from trunkline.step import PageCopy, Plan, StepResult

# Times the pages there are: the largest cache whose hit rate is estimated.
REUSE_HORIZON = 64


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
        copies: list[PageCopy] | None = None,
        tiers: Tiers | None = None,
        grammars: Compiler | None = None,
        grammar_config: GrammarConfig | None = None,
    ) -> None:
        """`tiers` append to `copies`: those of the next plan, in the order in which they became necessary."""
        self.config = config
        self.cache = cache
        self.pace = Pace()
        self.counters = Counters()
        self.running: list[Request] = []  # in order of admission
        self.fairness = Fairness(burst=BURST_STEPS * config.max_num_batched_tokens)
        self.copies = copies if copies is not None else []
        self.tiering = Tiering(config, cache, self.pace, tiers)
        self.admission = Admission(config, cache, self.pace, self.running, self.counters, self.fairness, self.tiering)
        self.groups = Groups(config, cache, self.admission, self.running, self.copies)
        self.drafter = Drafter(config, cache, self.pace, self.counters)
        self.constraints = Constraints(grammars, grammar_config or GrammarConfig(), self.counters)
        self.grouping = Grouping(cache.page_size)
        self.reuse = ReuseEstimator(page_size=cache.page_size, horizon=REUSE_HORIZON * cache.num_pages)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.now = 0.0  # seconds, as last told
        self.last_step = 0  # newest step submitted
        cache.step_done(self.last_step)  # nothing waits for it: the first step, 1, may never be submitted
        self._pieces: dict[int, list[Piece]] = {}  # by step in flight
        self._masks: dict[int, StepMasks] = {}  # by step in flight, of those that have any
        self._num_arrived = 0
        self._by_priority = config.policy == "priority"

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
        **wishes: Unpack[Wishes],
    ) -> Request:
        """A Request numbered in order of arrival and limited by the model and the cache."""
        self._num_arrived += 1
        return Request(
            request_id,
            prompt=prompt,
            sampling=sampling,
            arrival=arrival,
            order=self._num_arrived,
            limit=self.max_tokens_per_request,
            end_ids=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else self.eos_token_ids),
            **wishes,
        )

    def add(self, request: Request) -> list[FromEngine]:
        """Queue a request; one that has nothing to compute is finished at once.

        Raises ContextLengthExceeded if prompt and one token can never fit, QueueFull if too much waits already,
        PinRefused if it is only to be kept, and nothing is, and InvalidParameter if nothing compiles its grammar.
        """
        check_pin(self.cache, request)
        self.constraints.check(request)
        num_cache_tokens = self.cache.num_pages * self.cache.page_size
        request.sampling.check_length(
            request.num_prompt, max_model_len=self.max_model_len, num_cache_tokens=num_cache_tokens
        )
        leader = self.groups.leader_of(request)
        if leader is None:  # who follows takes no place of its own in the queue
            self.admission.limits.check(request)
        self.requests[request.request_id] = request
        self.fairness.enter(request)
        if not request.wants_something or (request.num_computable <= 0 and not request.awaits_grammar):
            return self._finish(request, "length")
        self.constraints.enter(request, leader)
        if leader is not None:
            self.groups.follow(leader, request)
            return []
        self.groups.lead(request)
        self.counters.prompt_tokens += request.num_prompt  # once for all that follow it
        if self.cache.enabled and not request.reads_all:
            self.reuse.see(request.namespace, bytes(request.tokens), request.num_prompt)
        self.admission.enqueue(request)
        return []

    @property
    def waiting(self) -> list[Request]:
        """Requests that hold nothing yet, in no particular order."""
        return self.admission.waiting

    def abort(self, request_id: str) -> None:
        """Forget a request in whatever state it is. Unknown and finished ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request)

    @property
    def has_work(self) -> bool:
        """True if `schedule` may find something to do, or a step is in flight."""
        return bool(self.waiting or self.running or self._pieces or self.copies or self.tiering.has_work)

    def poll(self) -> list[FromEngine]:
        """Go on with those whose grammars are compiled. Returns what the callers of others are told."""
        messages: list[FromEngine] = []
        for request, error in self.constraints.poll():
            if error is not None:
                self._end(request)
                messages.append(failed_message(request.request_id, error))
            elif request.text is not None and request.text.is_over:  # nothing is all that may be written
                messages += self._finish(request, "stop")
            else:
                self._begin(request)
        return messages

    def _begin(self, request: Request) -> None:
        """What its text must begin with is known before the prompt is read."""
        request.untold = self.constraints.first(request)
        if request.untold and request.state is State.WAITING:
            self.admission.extend(request, request.untold)
        else:
            request.extend(request.untold)
        self._count_output(request, len(request.untold))

    # ---------------------------------------------------------------- plan

    def schedule(self, now: float) -> Plan | None:
        """The next step, or None if nothing can be computed now. `now` in seconds, on the clock of arrivals.

        1. Running requests that generate catch up, by one token each and those that a grammar forced (constraints.py).
        2. Prompts are read with the tokens that are left, in turn (turns.py): those under way, and, if no page was
           short, those of waiting requests, which are admitted for it while places and pages last.
        """
        self.now = now
        self.cache.tick(now)
        self.tiering.poll(now)
        builder = PlanBuilder(self.last_step + 1, self.eos_token_ids, max_forks=self.config.max_num_seqs)
        pieces: list[Piece] = []
        turns = Turns(self.admission, builder, self.max_step_tokens(), now)
        if self._plan_running(builder, pieces, turns):
            pieces += turns.admit()
        if not pieces and not self.copies:
            self.tiering.poll(now, idle=not self._pieces)
            return None
        plan = builder.build(self.grouping, tuple(self.copies))
        self.copies.clear()
        self.last_step += 1
        self.tiering.step_planned(self.last_step)
        self._pieces[self.last_step] = pieces
        if len(builder.masks):
            self._masks[self.last_step] = builder.masks
        for piece in pieces:
            piece.request.num_planned = piece.end
            if piece.row is not None:
                piece.request.num_in_flight += 1
                piece.request.row_in_flight = piece.row
                piece.request.num_drafts = piece.num_drafts
        return plan

    def max_step_tokens(self) -> int:
        """Of the next step, see shares.max_step_tokens."""
        return max_step_tokens(self.config, self.pace, self.running, self.waiting, self.cache.page_size)

    def _plan_running(self, builder: PlanBuilder, pieces: list[Piece], turns: Turns) -> bool:
        """Let running requests catch up. Returns False if pages were short.

        Budget goes to those that generate first, then to prompts in turn, waiting requests among them; pages go to the
        most urgent first, so that victims are always the least urgent.
        """
        by_urgency = sorted(self.running, key=self._urgency)
        shares = Shares(by_urgency, turns.max_tokens, turn=turns.turn)
        num_new, budget = shares.num_new, shares.left
        self.drafter.start_step(shares.num_tokens - shares.num_generating, shares.num_generating)
        num_running = len(by_urgency)
        served = {request for request in by_urgency if num_new[request] and self._make_room(request, num_new[request])}
        # Nobody was preempted, and nobody waits for pages.
        enough = len(self.running) == num_running and len(served) == num_running - list(num_new.values()).count(0)
        for request in shares.generating:
            if request in served and request.state is State.RUNNING:
                ready = not request.num_in_flight and completes(request, num_new[request])
                draft = self.drafter.propose(request, budget) if ready else None
                pieces.append(builder.add(request, num_new[request], draft))
                budget -= len(draft.token_ids) if draft is not None else 0
                if request.num_charged < request.num_prompt:
                    self.fairness.charge_prompt(request, pieces[-1].end)
        for request in shares.reading:
            if enough:
                pieces += turns.admit(before=request)
            n = min(num_new[request], turns.max_tokens - builder.num_tokens)
            if n > 0 and request in served and request.state is State.RUNNING:
                pieces.append(builder.add(request, n))
                self.fairness.charge_prompt(request, pieces[-1].end)
        return enough

    def _make_room(self, request: Request, num_new: int) -> bool:
        """Pages for the next `num_new` tokens of a running request, preempting the least urgent, in the end itself."""
        while request.lease is not None:  # else it was preempted for another
            missing = self.cache.num_pages_of(request.num_planned + num_new) - request.lease.num_pages
            if missing <= 0 or self.cache.grow(request.lease, missing):
                return True
            if self.cache.in_flight:
                return False  # pages come back when the step in flight is done: wait rather than preempt more
            window, page_size = self.config.window_seconds, self.cache.page_size
            victim = choose_victim(self.running, request, self._urgency, window, page_size)
            if len(self.running) == 1 and self.cache.yield_pins(missing):
                continue  # nobody else is left to give pages, and a pin must not keep the last one from ending
            self._preempt(victim)
        return False

    def _urgency(self, request: Request) -> Urgency:
        """Smaller is more urgent: the lowest priority, then the latest arrival, is preempted first."""
        return (request.priority if self._by_priority else 0), request.order

    def _preempt(self, request: Request) -> None:
        """Give the request's pages back. Those it computed are in the tree: resuming finds them again unless they are
        evicted, and those that were swapped out, in host memory even then."""
        swapped = self.tiering.swap_out(request)
        self._release(request)
        self.running.remove(request)
        request.num_preemptions += 1  # a piece in flight is stale now: what it chooses is chosen again, the same token
        request.reset_progress()
        self.admission.enqueue(request)
        self.counters.preemptions_by_way["swap" if swapped else "recompute"] += 1

    def fill_masks(self, step: int) -> None:
        """Fill the masks of a step that the worker has been given, those that can be."""
        if step in self._masks:
            self.constraints.fill([self._masks[step]])

    def fill_late_masks(self) -> None:
        """Fill those that waited for the step which was applied, or lost, just now."""
        self.constraints.fill([masks for masks in self._masks.values() if masks.is_late], late=True)

    # ---------------------------------------------------------------- apply

    def apply(self, result: StepResult, now: float) -> list[FromEngine]:
        """Take in what a finished step computed and chose; returns what the callers are told."""
        self.now = now
        self.cache.tick(now)
        messages: list[FromEngine] = []
        pieces = self._pieces.pop(result.step)
        if (masks := self._masks.pop(result.step, None)) is not None:
            result = replace(result, failed=result.failed | masks.failed)
        self.cache.step_done(result.step)
        self.tiering.step_done(result.step, result.copy_seconds)
        for piece in pieces:
            request = piece.request
            if piece.start < request.num_prompt:
                self.counters.prompt_tokens_computed += min(piece.end, request.num_prompt) - piece.start
            if request.state is State.FINISHED or piece.num_preemptions != request.num_preemptions:
                continue
            if result.failed:
                failure = next((result.failed[row] for row in piece.own_rows if row in result.failed), None)
                if failure is not None:
                    messages += [*self._fail_forks(piece, result), self._fail(request, failure)]
                    continue
            got = self._advance(piece, result)
            if request.pin_seconds and piece.end >= request.num_prompt:
                refused = pin_prompt(self.cache, self.tiering, request, now)
                if refused is not None:
                    self._end(request)
                    messages.append(failed_message(request.request_id, refused))
                    continue
            if piece.start < request.num_prompt <= piece.end:
                messages += self._fork(piece, result)
            if got is not None:
                messages += self._tell(request, got)
            elif not request.wants_token and request.num_computed >= request.num_computable:
                messages.append(tokens_message(request, Chosen([], None, 0), now))
                messages += self._finish(request, "length")
        return messages

    def lose(self, step: int, *, submitted: bool) -> None:
        """A step has failed as a whole: forget who took part in it, for nobody knows what was written."""
        pieces = self._pieces.pop(step)
        if (masks := self._masks.pop(step, None)) is not None:
            masks.abandon()
        self.tiering.step_lost(step)
        if submitted:
            self.cache.step_done(step)
        else:
            self.last_step -= 1  # it never ran, so nothing waits for it; the one before it may still be in flight
        for piece in pieces:
            request = piece.request
            if request.state is not State.FINISHED and piece.num_preemptions == request.num_preemptions:
                self._end(request)
        for request in [request for request in self.running if request.forked_in == step]:
            self._end(request)

    def _advance(self, piece: Piece, result: StepResult) -> Chosen | None:
        """The piece's KV is written: count it, take in the tokens that were chosen, and publish whole pages.

        The KV of a draft that was wrong lies beyond `num_computed`, in pages of the request's own, and is written over.
        """
        request = piece.request
        got = None
        request.num_computed = piece.end
        if piece.prompt_rows:
            request.prompt_logprobs += [token_logprobs(result.logprobs[row]) for row in piece.prompt_rows]
        if piece.pooled is not None:
            assert result.pooled is not None, "the plan wants sums"
            request.pool(result.pooled[piece.pooled])
        if piece.row is not None:
            drafts = piece.draft.token_ids if piece.draft is not None else NO_TOKENS
            found = chosen(request, piece.row, drafts, result)
            request.num_in_flight -= 1
            got = self._take(request, found)
            request.num_computed += len(found.token_ids) - 1
        if piece.draft is not None and got is not None:
            request.num_drafts = 0
            request.num_planned = request.num_computed
            self.drafter.verified(request, piece.draft, got.num_accepted)
        self._publish(request)
        return got

    def _take(self, request: Request, got: Chosen) -> Chosen:
        """Append what was chosen, and what a grammar forces after it. Returns all tokens the caller is yet to be told."""
        request.extend(got.token_ids)
        forced: list[int] = []
        if request.text is not None and not got.ended and got.failure is None:
            forced = self.constraints.next(request)
            request.extend(forced)
        self._count_output(request, len(got.token_ids) + len(forced))
        if not forced and not request.untold:
            return got
        untold, request.untold = request.untold, []
        ended = got.ended or (bool(forced) and request.text is not None and request.text.is_over)
        return got._replace(token_ids=[*untold, *got.token_ids, *forced], ended=ended)

    def _count_output(self, request: Request, num_tokens: int) -> None:
        self.counters.generation_tokens += num_tokens
        self.fairness.charge_output(request, num_tokens)

    def _tell(self, request: Request, got: Chosen) -> list[FromEngine]:
        """Tokens that were taken in, and how the request ended if it did."""
        messages: list[FromEngine] = [tokens_message(request, got, self.now)] if got.token_ids else []
        if got.failure is not None:
            return [*messages, self._fail(request, got.failure)]
        if got.ended and not (request.text is not None and request.text.closed):
            return messages + self._finish(request, "stop", stop_token_id=got.stop_id)
        if got.ended or request.num_tokens >= request.limit:
            return messages + self._finish(request, "length")
        return messages

    # ---------------------------------------------------------------- groups

    def _fork(self, piece: Piece, result: StepResult) -> list[FromEngine]:
        """The prompt of a group is read: its followers get their first tokens, and go on by themselves."""
        leader = piece.request
        messages: list[FromEngine] = []
        for follower, row in piece.forks:
            if follower.leader is not leader:
                continue  # aborted
            self.groups.leave(follower)
            follower.cached_tokens, follower.cache_report = leader.cached_tokens, leader.cache_report
            follower.admitted_at, follower.num_charged = leader.admitted_at, leader.num_charged
            got = self._take(follower, chosen(follower, row, NO_TOKENS, result))
            messages += self._tell(follower, got)
            if follower.state is State.FOLLOWING and not self.groups.fork(leader, follower, self.last_step + 1):
                self.admission.enqueue(follower)
        self.groups.disband(leader)
        return messages

    def _fail_forks(self, piece: Piece, result: StepResult) -> list[FromEngine]:
        """What the leader read is not sound: followers whose own rows show it fail, too."""
        failed = [fork for fork in piece.forks if fork.request.leader is piece.request and fork.row in result.failed]
        return [self._fail(follower, result.failed[row]) for follower, row in failed]

    # ---------------------------------------------------------------- pages

    def _publish(self, request: Request) -> None:
        """Give the tree every whole page that is computed."""
        lease = request.lease
        assert lease is not None
        if request.num_computed >= (lease.num_shared + 1) * self.cache.page_size:
            self.cache.commit(lease, bytes(request.tokens), request.num_computed, after_step=self.last_step)

    def _release(self, request: Request) -> None:
        """Give back the lease. What is not published by now never is; pages in flight return after their step."""
        if request.lease is None:
            return
        tail = bytes(request.tokens[request.lease.num_shared * self.cache.page_size * TOKEN_BYTES :])
        self.cache.release(request.lease, after_step=self.last_step, tail=tail if request.num_output else b"")
        request.lease = None

    def _end(self, request: Request) -> None:
        """Out of every list, holding nothing."""
        self._release(request)
        if request.state is State.WAITING and request in self.waiting:
            self.admission.dequeue(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
        if request.leader is not None:
            self.groups.leave(request)
        request.state = State.FINISHED
        request.match = None
        del self.requests[request.request_id]
        self.constraints.leave(request)
        self.fairness.leave(request)
        self.groups.disband(request)

    def _fail(self, request: Request, why: str) -> Failed:
        self._end(request)
        return Failed(request_id=request.request_id, message=why)

    def _finish(self, request: Request, reason: str, stop_token_id: int | None = None) -> list[FromEngine]:
        self._end(request)
        return [finished_message(request, reason, stop_token_id)]

    def check(self) -> None:
        """Raise AssertionError if requests, leases and pages disagree. Cheap enough for every idle moment."""
        self.cache.check()
        self.tiering.check()
        for request in self.requests.values():
            audit_request(request, self.cache.page_size)
        following = sum(len(request.followers) for request in self.requests.values())
        assert len(self.waiting) + len(self.running) + following == len(self.requests)
        if not self.requests and not self._pieces:
            audit_idle(self.cache)

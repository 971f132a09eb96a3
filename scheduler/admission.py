"""Admission: the queue, what is cached of each prompt in it, and what it takes to start a request.

    admission.enqueue(request)           # looked up at once
    admission.start(request, now)        # "", or why not: "needs 40 pages; 12 are available"
    admission.reasons()                  # why each request waits, in words

Whose turn it is, and who may go before whom, is turns.py.
"""

from typing import NamedTuple

from trunkline.config import SchedulerConfig
from trunkline.radix.cache import Match, PrefixCache
from trunkline.radix.explain import first_tokens
from trunkline.radix.node import TOKEN_BYTES, Node
from trunkline.scheduler.counters import Counters
from trunkline.scheduler.fairness import Fairness
from trunkline.scheduler.limits import QueueLimits
from trunkline.scheduler.pace import Pace
from trunkline.scheduler.policy import QueueOrder
from trunkline.scheduler.reports import Reports
from trunkline.scheduler.request import Request, State
from trunkline.scheduler.tiering import Tiering

# Waiting requests whose look-ups are kept fresh. Those behind keep the key of their last look-up until they come near.
NUM_CANDIDATES = 64


class NextPage(NamedTuple):
    """A page that is not in the tree yet: two requests whose next pages are equal would compute the same one."""

    parent: Node  # the prefix it continues, namespace included
    tokens: bytes


class Admission:
    """The queue, and the way out of it.

    waiting     requests that hold nothing yet, in no particular order
    limits      how many may wait
    reports     why their prompts are cached as far as they are
    obstacles   of those that were looked at in the last step, in words
    standstill  why none of the others was looked at; "": no reason is known
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        pace: Pace,
        running: list[Request],
        counters: Counters,
        fairness: Fairness,
        tiering: Tiering,
    ) -> None:
        """`running` is the scheduler's own list: who is admitted is appended to it."""
        self.config = config
        self.cache = cache
        self.order = QueueOrder(config, pace)
        self.limits = QueueLimits(config, pace, self.backlog)
        self.waiting: list[Request] = []
        self.running = running
        self.counters = counters
        self.fairness = fairness
        self.tiering = tiering
        self.reports = Reports(cache, tiering.ghost)
        self.obstacles: dict[Request, str] = {}
        self.standstill = ""

    # ---------------------------------------------------------------- the queue

    def enqueue(self, request: Request) -> None:
        """Wait for admission. The first look-up is made here: however long the queue, no warm prompt counts as cold."""
        request.state = State.WAITING
        request.match = self._look_up(request)
        self.tiering.look_up(request)
        self.waiting.append(request)
        self.limits.enter(request)

    def dequeue(self, request: Request) -> None:
        """Wait no more, whatever comes next."""
        self.waiting.remove(request)
        self.limits.leave(request)
        self.obstacles.pop(request, None)
        self.tiering.forget(request)
        request.match = None

    def extend(self, request: Request, token_ids: list[int]) -> None:
        """Tokens of a waiting request have become known: it is looked up again."""
        self.limits.leave(request)
        request.extend(token_ids)
        self.limits.enter(request)
        request.match = self._look_up(request)
        self.tiering.look_up(request)

    def reasons(self) -> dict[Request, str]:
        """Why each waiting request waits, in words; in queue order, tenant by tenant. O(n log n): only when asked."""
        self.order.sort(self.waiting)
        reasons: dict[Request, str] = {}
        for rank, line in enumerate(self._lines(self.waiting).values()):
            for position, request in enumerate(line):
                reason = self.obstacles.get(request, "")
                if not reason and position:
                    reason = f"behind {position} more urgent request{'s' if position > 1 else ''}"
                elif not reason and rank:
                    reason = "its tenant was served more than others that wait"
                reasons[request] = reason or self.standstill or "its turn comes next"
        return reasons

    def backlog(self, tenant: str | None) -> int:
        """Tokens that waiting requests will compute, of one tenant or all. What is cached doesn't count.

        A prefix that several lack counts once, or not at all if a running request computes it. This is an estimate: a
        prompt is only compared with the first one that computes the same next page. O(waiting requests and their
        tokens).
        """
        num_tokens, page_size = 0, self.cache.page_size
        first = self.computing()
        for request in self.waiting:
            if tenant not in (None, request.namespace.tenant):
                continue
            self.renew(request)
            num_uncached = request.num_uncached
            page = self.next_page(request)
            other = request if page is None else first.setdefault(page, request)
            if other is not request:
                num_common = _num_common(other, request) // page_size * page_size
                num_uncached = max(1, min(num_uncached, request.num_tokens - num_common))
            num_tokens += num_uncached
        return num_tokens

    # ---------------------------------------------------------------- whose turn

    def tenant(self, request: Request) -> str:
        """Whose request it is, as far as turns are concerned: without fairness all are one."""
        return request.namespace.tenant if self.config.fairness else ""

    def service(self, tenant: str) -> int:
        """What the tenant was served; less goes first."""
        return self.fairness.service(tenant) if self.config.fairness else 0

    def least_service(self) -> int:
        """That any tenant which waits was served; somebody has to wait. O(waiting tenants)."""
        return min(map(self.service, self.limits.by_tenant)) if self.config.fairness else 0

    def candidates(self) -> dict[str, list[Request]]:
        """By tenant, who was served least first: the first waiting requests in queue order, with fresh look-ups.

        Of NUM_CANDIDATES in all, each tenant has its share.
        """
        self.order.sort(self.waiting)
        candidates = self._first()
        renewed = [self.renew(request) for request in candidates]
        if any(renewed):
            self.order.sort(self.waiting)
            candidates = self._first()
        return self._lines(candidates)

    def _first(self) -> list[Request]:
        """The first of the sorted queue; of the sorted queue of each tenant, if there are several."""
        if len(self.limits.by_tenant) == 1 or not self.config.fairness:
            return self.waiting[:NUM_CANDIDATES]
        lines = list(self._lines(self.waiting).values())[:NUM_CANDIDATES]
        return [request for line in lines for request in line[: max(1, NUM_CANDIDATES // len(lines))]]

    def _lines(self, requests: list[Request]) -> dict[str, list[Request]]:
        """Requests by tenant, whose order stays. Tenants that were served least come first, of equal ones the first."""
        lines: dict[str, list[Request]] = {}
        for request in requests:
            lines.setdefault(self.tenant(request), []).append(request)
        return dict(sorted(lines.items(), key=lambda line: self.service(line[0])))

    # ---------------------------------------------------------------- look-ups

    def _look_up(self, request: Request) -> Match:
        limit = 0 if request.reads_all else None
        return self.cache.match(request.namespace, bytes(request.tokens), request.num_tokens, limit=limit)

    def renew(self, request: Request) -> bool:
        """Look the request up again if anything else could be found than the last time. O(1) if not."""
        assert request.match is not None
        if self.cache.is_valid(request.match):
            page = self.next_page(request)
            if page is None or page.tokens not in page.parent.children:
                return False
        request.match = self._look_up(request)
        return True

    def computing(self) -> dict[NextPage, Request]:
        """The pages that running requests compute next. Nobody waits for one who waits for a grammar."""
        return {
            page: request
            for request in self.running
            if not (request.awaits_grammar and request.num_to_plan <= 0) and (page := self.next_page(request))
        }

    def next_page(self, request: Request) -> NextPage | None:
        """The whole page that the request computes next, running or once admitted; None if it would not be shared.

        A waiting request computes its last token in any case, so the page of that token is of no use to it.
        """
        if request.lease is not None:
            node, num_shareable = request.lease.node, request.num_tokens
        else:
            assert request.match is not None
            node, num_shareable = request.match.node, 0 if request.reads_all else request.num_tokens - 1
        start, end = node.depth * self.cache.page_size, (node.depth + 1) * self.cache.page_size
        if end > num_shareable or not self.cache.enabled:
            return None
        return NextPage(node, bytes(request.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]))

    # ---------------------------------------------------------------- starting

    def start(self, request: Request, now: float) -> str:
        """Lease the pages of all known tokens and of the next one: "", or why not, and then nothing has changed.

        One page more must be free if others run, so that the newcomer does not preempt somebody in its first steps.
        """
        match = request.match
        assert match is not None
        num_new = self.cache.num_pages_of(min(request.num_tokens + 1, request.limit)) - match.num_pages
        needed = num_new + (1 if self.running else 0)
        available = self.cache.available - _num_evictable(match.node)
        if needed > available and not self.running and not self.cache.in_flight:
            self.cache.yield_pins(needed + self.cache.available - available)  # or it would wait until they end
            available = self.cache.available - _num_evictable(match.node)
        if needed > available:
            return f"needs {needed} pages; {available} are available"
        report = self.reports.at_admission(request) if request.cached_tokens is None else None
        lease = self.cache.admit(match, num_new, request.priority)
        if lease is None:
            return f"needs {needed} pages; {available} are available"
        request.lease = lease
        request.num_computed = request.num_planned = match.num_tokens
        loaded = self.tiering.load(request)
        request.num_charged = max(request.num_charged, min(request.num_planned, request.num_prompt))
        # Of a newcomer, what is told of it: its prompt, and not what a grammar forces after that.
        num_asked = request.num_tokens if report is None else request.num_prompt
        self.counters.prefix_cache_queries += num_asked
        for tier, num_tokens in first_tokens({"device": match.num_tokens, **loaded}, num_asked).items():
            self.counters.hits_by_tier[tier] += num_tokens
        if report is not None:
            report = self.reports.at_admission(request, loaded) if loaded else report
            self.reports.count(report)
            request.cache_report = report
            request.cached_tokens = report.cached_tokens
            request.admitted_at = now
        self.dequeue(request)
        request.state = State.RUNNING
        self.running.append(request)
        return ""


def _num_common(a: Request, b: Request) -> int:
    """Tokens that both begin with."""
    num = min(a.num_tokens, b.num_tokens)
    differs = a.token_ids(0, num) != b.token_ids(0, num)
    return int(differs.argmax()) if differs.any() else num


def _num_evictable(node: Node) -> int:
    """Pages on the path to `node` that are evictable now, and won't be once the path is locked."""
    num_pages = 0
    while not node.locks:
        num_pages += len(node.pages)
        node = node.parent
    return num_pages

"""Turns: who is admitted in a step, one after the other, and who may go before whom.

Whose turn it is: the tenant that was served least goes first (fairness.py), and of its requests the one that the policy
puts first (policy.py); so do prompts that are being read already. Some have to be passed: they don't fit yet, or wait
for what another computes. Others may go before them only within bounds, so that waiting has an end:

    r passed, arrived at t         of the same tenant, whoever arrived before t + W may go first
    r was preempted                of the same tenant, whoever arrived before t
    r does not fit                 of other tenants, only those that were served less; and only 16 more are looked at
    … and has waited for W / 2     of the same tenant, nobody any more: what comes free is kept for r
"""

import math
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from trunkline.scheduler.admission import Admission, NextPage
from trunkline.scheduler.planner import Piece, PlanBuilder
from trunkline.scheduler.request import Request

# Further candidates that are looked at once one did not fit.
LOOK_AHEAD = 16


class Line(NamedTuple):
    """The candidates of a tenant, the most urgent last. The least line goes first."""

    service: int  # that the tenant was served, as far as known
    place: int  # by the urgency of its first request; unique
    tenant: str
    requests: list[Request]


class Turns:
    """The admissions of one step.

    turns = Turns(admission, builder, max_tokens, now)
    pieces += turns.admit(before=request)      # those whose turn comes before the rest of a running request's prompt
    pieces += turns.admit()                    # and then all others

    Requests are looked at in turn, each at most once, while there are places and, up to `max_tokens`, tokens.
    """

    def __init__(self, admission: Admission, builder: PlanBuilder, max_tokens: int, now: float) -> None:
        self.admission = admission
        self.builder = builder
        self.max_tokens = max_tokens
        self.now = now
        self._rank = admission.order.rank()
        self._lines: list[Line] | None = None  # a heap, once somebody's turn may have come
        self._computing: dict[NextPage, Request] = {}
        self._passed = Passed(admission, now)
        self._num_ahead = 0  # looked at since one did not fit
        admission.obstacles.clear()
        admission.standstill = ""

    def turn(self, request: Request) -> tuple[int, tuple[float, ...]]:
        """Less goes first, waiting or running."""
        return self.admission.service(self.admission.tenant(request)), self._rank(request)

    def admit(self, before: Request | None = None) -> list[Piece]:
        """Admit requests whose turn it is; their first pieces, added to the builder.

        A request whose next page is just being computed by another waits for it (one step at a time, so at most until
        the other has read its prompt): the same prefix is computed once.
        """
        pieces = []
        while (request := self._next(before)) is not None:
            obstacle = self._start(request)
            if obstacle:
                self.admission.obstacles[request] = obstacle
                continue
            num_new = min(request.num_to_plan, self.max_tokens - self.builder.num_tokens)
            if num_new:  # all but the last token may be cached, and that one waits for a grammar
                pieces.append(self.builder.add(request, num_new))
                self.admission.fairness.charge_prompt(request, pieces[-1].end)
        return pieces

    def _next(self, before: Request | None) -> Request | None:
        """The request whose turn it is; None if there is none, no room, or if it comes after that of `before`."""
        admission = self.admission
        admission.standstill = self._no_room()
        if admission.standstill or self._num_ahead >= LOOK_AHEAD or not admission.waiting:
            return None
        limit = None if before is None else self.turn(before)
        if self._lines is None:
            if limit is not None and limit <= (admission.least_service(), ()):
                return None  # nobody can be before that: nothing needs to be sorted yet
            lines = admission.candidates().items()
            self._lines = [
                Line(admission.service(tenant), place, tenant, requests[::-1])
                for place, (tenant, requests) in enumerate(lines)
            ]
            heapify(self._lines)
            self._computing = admission.computing()
        while self._lines:
            line = self._lines[0]
            service = admission.service(line.tenant)
            if not line.requests:
                heappop(self._lines)
            elif service != line.service:  # it was served since
                heapreplace(self._lines, line._replace(service=service))
            elif limit is not None and self.turn(line.requests[-1]) >= limit:
                return None
            else:
                self._num_ahead += self._passed.any_without_pages
                return line.requests.pop()
        return None

    def _no_room(self) -> str:
        """Why nobody at all can start, or "" if somebody might."""
        config = self.admission.config
        if len(self.admission.running) >= config.max_num_seqs:
            return (
                f"all {config.max_num_seqs} places are taken" if config.max_num_seqs > 1 else "the only place is taken"
            )
        if self.builder.num_tokens >= self.max_tokens:
            return "this step's tokens are spent"
        return ""

    def _start(self, request: Request) -> str:
        """Start a request whose turn it is: "", or what stands against it."""
        if not self._passed.may_be_passed_by(request):
            return "behind a more urgent request that cannot start yet"
        self.admission.renew(request)
        page = self.admission.next_page(request)
        if page in self._computing:
            self._passed.add(request, fits=True)
            return f"waits for {self._computing[page].request_id} to compute the same prefix"
        if obstacle := self.admission.tiering.obstacle(request, self.now):
            self._passed.add(request, fits=True)
            return obstacle
        if obstacle := self.admission.start(request, self.now):
            self._passed.add(request, fits=False)
            return obstacle
        if page:
            self._computing[page] = request
        return ""


class Passed:
    """Requests whose turn it was and that could not start, and who may go before them."""

    def __init__(self, admission: Admission, now: float) -> None:
        self.admission = admission
        self.window = admission.config.window_seconds
        self.now = now
        self._bounds: dict[str, float] = {}  # by tenant: who arrived then or later may not go first
        self._without_pages: set[str] = set()  # tenants with a request that does not fit

    def add(self, request: Request, *, fits: bool) -> None:
        """The request has to wait: for pages, or though it fits."""
        tenant = self.admission.tenant(request)
        bound = request.arrival + (0.0 if request.num_preemptions else self.window)
        if not fits and self.now >= request.arrival + self.window / 2:
            bound = -math.inf
        self._bounds[tenant] = min(bound, self._bounds.get(tenant, bound))
        if not fits:
            self._without_pages.add(tenant)

    @property
    def any_without_pages(self) -> bool:
        """True if a request did not fit."""
        return bool(self._without_pages)

    def may_be_passed_by(self, request: Request) -> bool:
        """True if the request may start before all that were added."""
        tenant = self.admission.tenant(request)
        service = self.admission.service(tenant)
        if any(self.admission.service(other) <= service for other in self._without_pages - {tenant}):
            return False
        return tenant not in self._bounds or request.arrival < self._bounds[tenant]

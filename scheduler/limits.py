"""How long the queue may get. Knows sizes and tenants; no pages, no order, no clock."""

from collections.abc import Callable

from trunkline.config import SchedulerConfig
from trunkline.errors import QueueFull
from trunkline.scheduler.pace import Pace
from trunkline.scheduler.request import Request

# Of the queue: what one tenant alone may fill of it, so that there is room for the others. Without tenants it is
# everybody's.
TENANT_SHARE = 0.75
# Seconds after which a refused client is asked to come back.
SOONEST_RETRY, LATEST_RETRY = 1.0, 60.0


class Size:
    """Of a queue: requests, and the tokens that they know."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.requests += num_requests
        self.tokens += num_tokens


class QueueLimits:
    """What waits, and what may still come.

    limits.check(request)      # raises QueueFull if it may not
    limits.enter(request)
    limits.leave(request)
    """

    def __init__(self, config: SchedulerConfig, pace: Pace, backlog: Callable[[str | None], int]) -> None:
        """backlog  tokens that those who wait will compute, of one tenant or all; asked when somebody is refused"""
        self.config = config
        self.pace = pace
        self.backlog = backlog
        self.all = Size()
        self.by_tenant: dict[str, Size] = {}  # those that wait for something
        self._backlogs: dict[str | None, int] = {}  # while nobody enters or leaves: many may be refused at once

    def check(self, request: Request) -> None:
        """Raises QueueFull if the queue, or its tenant's part of it, has no room for one more request.

        Of tokens only: whoever would be alone in the queue may be as large as it likes, or it could never be served.
        """
        config, tenant = self.config, request.namespace.tenant
        own = self.by_tenant.get(tenant) or Size()
        share = TENANT_SHARE if config.fairness and tenant else 1.0
        for size, part, whose, of in (
            (self.all, 1.0, "the queue", None),
            (own, share, "your part of the queue", tenant),
        ):
            most = max(1, int(part * config.max_waiting_requests))
            if size.requests >= most:
                raise QueueFull("requests", whose, size.requests + 1, most, retry_after=self._retry_after(of))
            most = max(1, int(part * config.max_waiting_tokens))
            if size.tokens and size.tokens + request.num_tokens > most:
                seen = size.tokens + request.num_tokens
                raise QueueFull("tokens", whose, seen, most, retry_after=self._retry_after(of))

    def enter(self, request: Request) -> None:
        """It waits. Those that were preempted, or can't follow any more, come whatever the limits say."""
        self._backlogs.clear()
        self.all.add(1, request.num_tokens)
        self.by_tenant.setdefault(request.namespace.tenant, Size()).add(1, request.num_tokens)

    def leave(self, request: Request) -> None:
        """It waits no more. It knows as many tokens as when it entered."""
        self._backlogs.clear()
        self.all.add(-1, -request.num_tokens)
        own = self.by_tenant[request.namespace.tenant]
        own.add(-1, -request.num_tokens)
        if not own.requests:
            del self.by_tenant[request.namespace.tenant]

    def _retry_after(self, tenant: str | None) -> float:
        """Seconds in which half of what waits is read, of one tenant or all: then there is room for who comes back."""
        if tenant not in self._backlogs:
            self._backlogs[tenant] = self.backlog(tenant)
        seconds = self._backlogs[tenant] * self.pace.seconds_per_token / 2
        return round(min(max(seconds, SOONEST_RETRY), LATEST_RETRY), 1)

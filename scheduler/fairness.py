"""Fairness between tenants: who was served least goes first. Counts tokens; knows no queue, no pages and no clock.

Virtual token counters, after Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (VTC). A tenant is
charged for what it had computed: each prompt token that was not cached, and each generated token twice, for it keeps a
place in a whole step.

    quiet      ▏▏▏                    its requests go first until it was served as much as the others
    flooding   ▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏       theirs go on whenever nobody with less waits

Idle time earns next to nothing: when a tenant comes back, its counter is lifted to that of the least served of the
active ones, less a burst. The paper knows no burst; with it, what a quiet tenant asks for now and then is done in one
go, and not in turns with those that never pause. Two tenants that both have work all the time still get the same, but
for one burst.
"""

from collections import OrderedDict

from trunkline.scheduler.request import Request

OUTPUT_WEIGHT = 2
# The burst, in full steps.
BURST_STEPS = 16
# Tenants without requests whose counters are kept at most, because lifting would not settle them. More: who left first
# is forgiven.
MAX_REMEMBERED = 4096


class Fairness:
    """The counters.

    burst  tokens that a tenant may be behind when it comes back, at most

    fairness = Fairness(burst=8192)
    fairness.enter(request)               # a request of tenant "a" arrives
    fairness.charge_prompt(request, 512)  # its first 512 tokens are being computed
    fairness.charge_output(request, 1)
    fairness.service("a")                 # tokens, from wherever all began; 514 more than at first
    fairness.leave(request)               # it has ended
    """

    def __init__(self, burst: int) -> None:
        self.burst = burst
        self._active: dict[str, int] = {}  # tenant -> its requests that have not ended
        self._service: dict[str, int] = {}  # of active tenants
        self._idle: OrderedDict[str, int] = OrderedDict()  # of those that lifting would not settle, by when they left
        self._level = 0  # what every active tenant was served at some time; never falls

    def service(self, tenant: str) -> int:
        """Tokens that an active tenant is taken to have been served. Less goes first."""
        return self._service[tenant]

    def enter(self, request: Request) -> None:
        """One more request of its tenant is there."""
        tenant = request.namespace.tenant
        if tenant not in self._active:
            self._rise()
            least = self._level - self.burst
            self._service[tenant] = max(least, self._idle.pop(tenant, least))
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, request: Request) -> None:
        """One request of its tenant has ended."""
        tenant = request.namespace.tenant
        self._active[tenant] -= 1
        if self._active[tenant]:
            return
        del self._active[tenant]
        self._rise()
        self._idle[tenant] = self._service.pop(tenant)
        if not self._service:  # nobody is left who could have been wronged
            self._level = max(self._level, self._idle[tenant])
            self._idle.clear()
        self._forget()

    def _rise(self) -> None:
        """Bring the level up to date. O(active tenants), and only when one comes or goes."""
        self._level = max(self._level, min(self._service.values(), default=self._level))

    def _forget(self) -> None:
        """Drop counters that would be lifted anyway, from the oldest on, and whatever is too much."""
        while self._idle:
            tenant, service = next(iter(self._idle.items()))
            if service > self._level - self.burst and len(self._idle) <= MAX_REMEMBERED:
                return
            del self._idle[tenant]

    def charge_prompt(self, request: Request, end: int) -> None:
        """Tokens of the request are computed up to `end`. Charged are those of its prompt, once: not what was cached,
        nor what has to be computed again because the engine took the pages back."""
        num_new = min(end, request.num_prompt) - request.num_charged
        if num_new > 0:
            request.num_charged += num_new
            self._service[request.namespace.tenant] += num_new

    def charge_output(self, request: Request, num_tokens: int) -> None:
        """Tokens were generated for the request."""
        self._service[request.namespace.tenant] += OUTPUT_WEIGHT * num_tokens

    @property
    def num_tenants(self) -> int:
        """Tenants with requests now."""
        return len(self._active)

    @property
    def num_remembered(self) -> int:
        """Counters kept, of whomever."""
        return len(self._service) + len(self._idle)

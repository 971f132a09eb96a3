"""Why prompts are cached as far as they are: a report of each at its first admission, counted by reason. Decides nothing.

report = reports.at_admission(request)     # before the request takes pages: making room may evict what explains it
reports.count(report)                      # once it is admitted
reports.misses                             # {"unseen": 12, "differs": 3}
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Mapping

from trunkline.messages import CacheReport
from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import Namespace
from trunkline.radix.explain import MAX_RELATED, NOTHING, MissingPage, explain
from trunkline.radix.tree import TOKEN_BYTES, Walk
from trunkline.scheduler.request import Request

MAX_FAMILIES = 1024  # of namespaces that are remembered


class Reports:
    """Reports on the prompts of one cache.

    misses  requests by the reason why their prompt was not cached further; those of which everything was don't count
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.misses: Counter[str] = Counter()
        # The namespaces of one tenant and the same weights, as far as requests came lately; the latest last.
        self._families: OrderedDict[tuple[str, str], OrderedDict[Namespace, None]] = OrderedDict()

    def at_admission(self, request: Request, beyond: Mapping[str, int] = NOTHING) -> CacheReport:
        """Of a request with a look-up of this moment. `beyond`: the tokens that lower tiers add, by the tier's name.

        Nobody computes its next page: admission would let it wait for that.
        """
        assert request.match is not None
        self._remember(request.namespace)
        limit = 0 if request.wants_prompt_logprobs else None
        walk, tokens = Walk(request.match.node, None, 0), bytes(request.tokens)
        related = self._related(request.namespace)
        pages = self._pages(beyond)
        return explain(
            self.cache, request.namespace, walk, tokens, request.num_prompt, limit=limit, beyond=pages, related=related
        )

    def of(
        self,
        namespace: Namespace,
        walk: Walk | None,
        prompt: bytes,
        beyond: Mapping[str, int],
        computing: Container[MissingPage],
    ) -> CacheReport:
        """Of a prompt that somebody asks about, as if it came now; `walk` is what `radix.explain.find` found.

        computing  the pages that running requests compute next
        """
        num_tokens, related = len(prompt) // TOKEN_BYTES, self._related(namespace)
        pages = self._pages(beyond)
        return explain(
            self.cache, namespace, walk, prompt, num_tokens, beyond=pages, computing=computing, related=related
        )

    def count(self, report: CacheReport) -> None:
        """A request was admitted with this report."""
        if report.reason != "complete":
            self.misses[report.reason] += 1

    def _remember(self, namespace: Namespace) -> None:
        family = self._families.setdefault((namespace.weights, namespace.tenant), OrderedDict())
        self._families.move_to_end((namespace.weights, namespace.tenant))
        family[namespace] = None
        family.move_to_end(namespace)
        if len(family) > MAX_RELATED:
            family.popitem(last=False)
        if len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)

    def _related(self, namespace: Namespace) -> list[Namespace]:
        """The namespaces that may have what this one doesn't, the latest first."""
        family = self._families.get((namespace.weights, namespace.tenant), ())
        return [other for other in reversed(family) if other != namespace]

    def _pages(self, tokens_by_tier: Mapping[str, int]) -> dict[str, int]:
        return {tier: num_tokens // self.cache.page_size for tier, num_tokens in tokens_by_tier.items()}

"""Why prompts are cached as far as they are: a report at the first admission, counted by reason. Decides nothing.

report = reports.at_admission(request)     # before the request takes pages: making room may evict what explains it
reports.count(report)                      # once it is admitted
reports.misses                             # {"unseen": 12, "differs": 3}
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping
from functools import partial

import msgspec

from trunkline.messages import CacheReport
from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import Namespace
from trunkline.radix.explain import MAX_RELATED, NOTHING, MissingPage, explain
from trunkline.radix.ghosts import Ghost
from trunkline.radix.tree import TOKEN_BYTES, Walk
from trunkline.scheduler.request import Request

MAX_FAMILIES = 1024  # of namespaces that are remembered


class Reports:
    """Reports on the prompts of one cache.

    misses  requests by the reason why their prompt was not cached further; those of which everything was don't count
    """

    def __init__(
        self, cache: PrefixCache, ghost: Callable[[Request, int], Ghost | None] = lambda request, page: None
    ) -> None:
        """`ghost` says what became of a request's page that lower tiers had."""
        self.cache = cache
        self._ghost = ghost
        self.misses: Counter[str] = Counter()
        # The namespaces of one tenant and the same weights, as far as requests came lately; the latest last.
        self._families: OrderedDict[tuple[str, str], OrderedDict[Namespace, None]] = OrderedDict()

    def at_admission(self, request: Request, beyond: Mapping[str, int] = NOTHING) -> CacheReport:
        """Of a request with a look-up of this moment. `beyond`: the tokens that lower tiers add, by the tier's name.

        Nobody computes its next page: admission would let it wait for that.
        """
        assert request.match is not None
        self._remember(request.namespace)
        report = self.of(
            request.namespace,
            Walk(request.match.node, None, 0),
            bytes(request.tokens)[: request.num_prompt * TOKEN_BYTES],
            beyond,
            limit=0 if request.reads_all else None,
            gone=partial(self._ghost, request),
        )
        # The look-up was limited, which it takes for a wish for logprobs: the other one who reads all is pooling.
        if report.reason == "prompt_logprobs" and not request.wants_prompt_logprobs:
            return msgspec.structs.replace(report, reason="pooling")
        return report

    def of(
        self,
        namespace: Namespace,
        walk: Walk | None,
        prompt: bytes,
        beyond: Mapping[str, int],
        *,
        computing: Container[MissingPage] = (),
        limit: int | None = None,
        gone: Callable[[int], Ghost | None] | None = None,
    ) -> CacheReport:
        """Of a prompt that somebody asks about, as if it came now; `walk` is what `radix.explain.find` found.

        computing  the pages that running requests compute next
        limit      as in PrefixCache.match
        gone       of a page that no tier has, what lower tiers remember
        """
        return explain(
            self.cache,
            namespace,
            walk,
            prompt,
            len(prompt) // TOKEN_BYTES,
            limit=limit,
            beyond={tier: num_tokens // self.cache.page_size for tier, num_tokens in beyond.items()},
            computing=computing,
            related=self._related(namespace),
            gone=gone,
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

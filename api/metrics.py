"""GET /metrics, in Prometheus' text format: what this process saw of its requests, and what the engine counts.

trunkline:…                   requests as this process saw them, and all that the engine told in its reply to the call "stats"
process_…                     this process: CPU, memory, files, as every Python program tells them
trunkline:engine_process_…    the same of the engine process

Every label has a bounded set of values, and those that can be foretold are there from the start, at 0: Prometheus does not see
the first step of a counter that appears with it. Names, kinds and labels are listed in docs/operating.md.
"""

import collections
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trunkline.api.generation import Generation
from trunkline.config import GRAMMAR_BACKENDS
from trunkline.errors import TrunklineError
from trunkline.messages import Totals

PREFIX = "trunkline:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEVICE = "device"  # the first tier of the cache

# Seconds. From a cached prompt on a fast device to a long cold one on a CPU.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)

FINISHED_REASONS = ("stop", "length", "abort")
# What a server answers that cannot serve, or not now; all other codes are about what somebody sent.
SERVER_FAILURES = (
    *("internal_error", "engine_dead", "grammar_broken"),  # something is wrong with it
    *("model_loading", "shutting_down", "rate_limit_exceeded", "grammar_overloaded"),  # come again later
)

disable_created_metrics()  # one `…_created` line for every counter, which no dashboard reads


class Metrics:
    """What the API process itself counts. Each has its own registry, so that two servers in one process don't mix."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        # What every request adds to; prometheus_client's own would search all buckets for each, and lock twice.
        self.time_to_first_token = Totals.within(*FIRST_TOKEN_BUCKETS)
        self.inter_token_latency = Totals.within(*TOKEN_BUCKETS)
        self.request_queue_time = Totals.within(*FIRST_TOKEN_BUCKETS)
        self.request_prefill_time = Totals.within(*FIRST_TOKEN_BUCKETS)
        self.e2e_request_latency = Totals.within(*REQUEST_BUCKETS)
        self.request_success = collections.Counter(dict.fromkeys(FINISHED_REASONS, 0))
        self.registry.register(_RequestCollector(self))
        self.request_failures = Counter(
            PREFIX + "request_failures", "Requests answered with an error.", ["code"], registry=self.registry
        )
        # Requests refused before the engine saw them, by the backend they ask for; told together with the engine's own.
        self.grammar_refused: collections.Counter[str] = collections.Counter()
        self.grammar_postcheck_failures = Counter(
            PREFIX + "grammar_postcheck_failures",
            "Finished texts that do not follow the schema, by the backend that followed them.",
            ["backend"],
            registry=self.registry,
        )
        for code in SERVER_FAILURES:
            self.request_failures.labels(code)
        for backend in GRAMMAR_BACKENDS[1:]:  # without "auto": it is known who wrote a text
            self.grammar_postcheck_failures.labels(backend)
        ProcessCollector(registry=self.registry)

    def render(self, engine: dict[str, Any] | None, *, is_ready: bool = True, engine_pid: int | None = None) -> bytes:
        """The page.

        engine      its reply to the call "stats"; None while it cannot answer
        is_ready    requests are taken, as /health says
        engine_pid  of its process; None: there is none
        """
        registry = CollectorRegistry()
        registry.register(_ApiCollector(self, engine or {}, is_ready))
        if engine is not None:
            registry.register(_EngineCollector(engine, self.model_name))
        if engine_pid is not None:
            ProcessCollector(PREFIX + "engine", lambda: engine_pid, registry=registry)
        return generate_latest(self.registry) + generate_latest(registry)


class RequestObserver:
    """Times one request (api.generation.Observer).

    arrived  when its time began, on time.perf_counter: as this is made, unless somebody knows better
    """

    def __init__(self, metrics: Metrics) -> None:
        self.arrived = time.perf_counter()
        self._metrics = metrics
        self._newest: dict[int, float] = {}  # choice -> when its newest token came

    def opened(self, generation: Generation) -> None:
        """Its time began before."""

    def compiled(self, seconds: float) -> None:
        """The engine counts compilations itself."""

    def tokens(self, index: int, num: int) -> None:
        now = time.perf_counter()
        if not self._newest:
            self._metrics.time_to_first_token.add(now - self.arrived)
        if index in self._newest:
            self._metrics.inter_token_latency.add(now - self._newest[index], count=num)
        self._newest[index] = now

    def first_token(self, queue_seconds: float, prefill_seconds: float) -> None:
        self._metrics.request_queue_time.add(queue_seconds)
        self._metrics.request_prefill_time.add(prefill_seconds)

    def finished(self, reason: str) -> None:
        self._metrics.request_success[reason] += 1
        if reason != "abort":
            self._metrics.e2e_request_latency.add(time.perf_counter() - self.arrived)

    def closed(self, generation: Generation, error: TrunklineError | None) -> None:
        """Failures are counted where they are answered."""


class _Family(NamedTuple):
    """One of the engine's statistics as Prometheus has it: a number, or a number for each value of a label.

    key    of `Engine.stats()`; its name here too
    label  whose values are the keys of the numbers
    plain  the value that is meant where the engine tells one number only
    """

    key: str
    documentation: str
    label: str
    plain: str = ""


_COUNTERS = (
    _Family("prefix_cache_queries_total", "Tokens looked up in the prefix cache.", "tier", DEVICE),
    _Family("prefix_cache_hits_total", "Tokens found in the prefix cache.", "tier", DEVICE),
    _Family("prefix_cache_misses_total", "Requests, by why no more of the prompt was cached.", "reason"),
    _Family("num_preemptions_total", "Requests that lost their pages to others.", "how", "recompute"),
    _Family("evicted_pages_total", "Cached pages given up for new ones.", "tier", DEVICE),
    _Family("tier_errors_total", "What went wrong in the tiers behind the device; a miss each.", "kind"),
    _Family("spec_decode_num_draft_tokens_total", "Draft tokens that were verified.", "source"),
    _Family("spec_decode_num_accepted_tokens_total", "Draft tokens that were right.", "source"),
)
MAX_VALUES = 16  # of one label; what comes after them counts as OTHER, so that no page grows without end
OTHER = "other"


class _RequestCollector(Collector):
    """What RequestObservers count."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        for key, documentation, totals in (
            (
                "time_to_first_token_seconds",
                "From the arrival of a request to its first token.",
                metrics.time_to_first_token,
            ),
            (
                "inter_token_latency_seconds",
                "Between two tokens of a choice; of those that came together, an equal part each.",
                metrics.inter_token_latency,
            ),
            (
                "request_queue_time_seconds",
                "From the arrival of a choice in the engine to its admission.",
                metrics.request_queue_time,
            ),
            (
                "request_prefill_time_seconds",
                "From the admission of a choice to its first token.",
                metrics.request_prefill_time,
            ),
            (
                "e2e_request_latency_seconds",
                "From the arrival of a request to the end of a choice.",
                metrics.e2e_request_latency,
            ),
        ):
            measured = {metrics.model_name: msgspec.structs.asdict(totals)}
            yield _histogram(key, documentation, "model_name", measured)
        yield _counter("request_success_total", "Choices that ended.", "finished_reason", metrics.request_success)


class _ApiCollector(Collector):
    """What is there while the engine is not, too."""

    def __init__(self, metrics: Metrics, stats: dict[str, Any], is_ready: bool) -> None:
        self._model_name = metrics.model_name
        self._is_ready = is_ready
        # By this process, which reads schemas, and by the engine, which compiles them.
        here: Mapping[str, int] = metrics.grammar_refused
        there: dict[str, int] = stats.get("grammar_refused_total", {})
        names = dict.fromkeys((*GRAMMAR_BACKENDS, *here, *there))
        self._refused: dict[str, float] = {name: here.get(name, 0) + there.get(name, 0) for name in names}

    def collect(self) -> Iterator[Metric]:
        ready = {self._model_name: float(self._is_ready)}
        yield _gauge("engine_ready", "1 while requests are taken, else 0, as /health says.", "model_name", ready)
        yield _counter("grammar_refused_total", "Grammars refused, by backend.", "backend", self._refused)


class _EngineCollector(Collector):
    """The engine's counters and gauges as Prometheus families. What the engine does not tell is left out."""

    def __init__(self, stats: dict[str, Any], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats, name = self._stats, self._model_name
        yield _gauge("num_requests_running", "Requests in the running batch.", "model_name", {name: stats["running"]})
        yield _gauge("num_requests_waiting", "Requests in the queue.", "model_name", {name: stats["waiting"]})
        # Of the device it is what running requests hold, as before there were tiers: cached pages are free to be used.
        usage = {**stats.get("tier_usage", {}), DEVICE: stats["kv_cache_usage"]}
        yield _gauge("kv_cache_usage_perc", "KV pages that are in use, 0 to 1.", "tier", usage)
        yield _gauge("kv_cache_pages", "KV pages by owner.", "owner", stats["pages"])
        if "pinned_pages" in stats:
            yield _gauge(
                "kv_cache_pinned_pages",
                "Cached pages that stay until a time.",
                "model_name",
                {name: stats["pinned_pages"]},
            )
        for key, documentation in (
            (
                "prompt_tokens_total",
                "Prompt tokens of accepted requests; a prompt that several choices share counts once.",
            ),
            ("prompt_tokens_computed_total", "Prompt tokens computed, rather than found in the cache."),
            ("generation_tokens_total", "Tokens generated."),
        ):
            yield _counter(key, documentation, "model_name", {name: stats[key]})
        for family in _COUNTERS:
            if family.key in stats:
                told = stats[family.key]
                numbers = told if isinstance(told, dict) else {family.plain: told}
                yield _counter(family.key, family.documentation, family.label, numbers)
        for key, documentation in (
            ("grammar_compile_seconds", "Compiling a grammar."),
            ("grammar_mask_seconds", "Filling the mask of one token."),
        ):
            if key in stats:
                yield _histogram(key, documentation, "backend", stats[key])
        yield _histogram("step_seconds", "Duration of a step.", "", {"": stats["step_seconds"]})
        yield _histogram("step_tokens", "Tokens computed in a step.", "", {"": stats["step_tokens"]})


def _gauge(name: str, documentation: str, label: str, numbers: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, number in _bounded(numbers).items():
        family.add_metric([value], number)
    return family


def _counter(name: str, documentation: str, label: str, numbers: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, number in _bounded(numbers).items():
        family.add_metric([value], number)
    return family


def _bounded(numbers: Mapping[str, float]) -> dict[str, float]:
    values = list(numbers.items())
    kept, rest = dict(values[:MAX_VALUES]), values[MAX_VALUES:]
    return {**kept, OTHER: sum(number for _, number in rest)} if rest else kept


def _histogram(name: str, documentation: str, label: str, measured: dict[str, dict[str, Any]]) -> HistogramMetricFamily:
    """What messages.Totals tell, for each value of a label; of one alone the label is ""."""
    family = HistogramMetricFamily(PREFIX + name, documentation, labels=[label] if label else [])
    for value, totals in measured.items():
        upto = itertools.accumulate(totals["counts"])
        buckets = [(floatToGoString(bound), number) for bound, number in zip(totals["bounds"], upto, strict=True)]
        buckets.append(("+Inf", totals["count"]))
        family.add_metric([value] if label else [], buckets=buckets, sum_value=totals["sum"])
    return family

"""What /metrics has to show, name by name: the contract with dashboards, alerts and docs/operating.md.

Counters are listed with their `_total`, histograms without `_bucket`. A label's values are bounded: those there may be are
listed, and None stands for those that a flag decides (the model's name).
"""

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from trunkline.radix.disk_tier import TROUBLES

PREFIX = "trunkline:"
BACKENDS = frozenset({"llguidance", "xgrammar", "outlines"})
TIERS = frozenset({"device", "host", "disk"})
SOURCES = frozenset({"tree", "prompt", "grammar"})
MISSES = frozenset(
    {
        *("short", "differs", "evicted", "computing", "namespace", "unseen"),
        *("prompt_logprobs", "pooling", "disabled", "other"),
    }
)


class Row(NamedTuple):
    """One name: its kind, and which values each label may have; None: the model's name, or a code of docs/api.md."""

    kind: str
    labels: dict[str, frozenset[str] | None]


_MODEL: dict[str, frozenset[str] | None] = {"model_name": None}
_TIER: dict[str, frozenset[str] | None] = {"tier": TIERS}
_BACKEND: dict[str, frozenset[str] | None] = {"backend": BACKENDS}
_SOURCE: dict[str, frozenset[str] | None] = {"source": SOURCES}
_PROCESS = {
    "cpu_seconds_total": Row("counter", {}),
    "virtual_memory_bytes": Row("gauge", {}),
    "resident_memory_bytes": Row("gauge", {}),
    "start_time_seconds": Row("gauge", {}),
    "open_fds": Row("gauge", {}),
    "max_fds": Row("gauge", {}),
}

TABLE: dict[str, Row] = {
    "trunkline:engine_ready": Row("gauge", _MODEL),
    "trunkline:num_requests_running": Row("gauge", _MODEL),
    "trunkline:num_requests_waiting": Row("gauge", _MODEL),
    "trunkline:kv_cache_usage_perc": Row("gauge", _TIER),
    "trunkline:kv_cache_pages": Row("gauge", {"owner": frozenset({"free", "tree", "lease", "copy"})}),
    "trunkline:kv_cache_pinned_pages": Row("gauge", _MODEL),
    "trunkline:prompt_tokens_total": Row("counter", _MODEL),
    "trunkline:prompt_tokens_computed_total": Row("counter", _MODEL),
    "trunkline:generation_tokens_total": Row("counter", _MODEL),
    "trunkline:prefix_cache_queries_total": Row("counter", _TIER),
    "trunkline:prefix_cache_hits_total": Row("counter", _TIER),
    "trunkline:prefix_cache_misses_total": Row("counter", {"reason": MISSES}),
    "trunkline:num_preemptions_total": Row("counter", {"how": frozenset({"recompute", "swap"})}),
    "trunkline:evicted_pages_total": Row("counter", _TIER),
    "trunkline:tier_errors_total": Row("counter", {"kind": frozenset({"no_slot", "unsaved", *TROUBLES})}),
    "trunkline:spec_decode_num_draft_tokens_total": Row("counter", _SOURCE),
    "trunkline:spec_decode_num_accepted_tokens_total": Row("counter", _SOURCE),
    "trunkline:grammar_compile_seconds": Row("histogram", _BACKEND),
    "trunkline:grammar_mask_seconds": Row("histogram", _BACKEND),
    "trunkline:grammar_refused_total": Row("counter", {"backend": BACKENDS | {"auto"}}),
    "trunkline:grammar_postcheck_failures_total": Row("counter", _BACKEND),
    "trunkline:step_seconds": Row("histogram", {}),
    "trunkline:step_tokens": Row("histogram", {}),
    "trunkline:time_to_first_token_seconds": Row("histogram", _MODEL),
    "trunkline:inter_token_latency_seconds": Row("histogram", _MODEL),
    "trunkline:e2e_request_latency_seconds": Row("histogram", _MODEL),
    "trunkline:request_queue_time_seconds": Row("histogram", _MODEL),
    "trunkline:request_prefill_time_seconds": Row("histogram", _MODEL),
    "trunkline:request_success_total": Row("counter", {"finished_reason": frozenset({"stop", "length", "abort"})}),
    "trunkline:request_failures_total": Row("counter", {"code": None}),
    **{f"process_{name}": row for name, row in _PROCESS.items()},
    **{f"trunkline:engine_process_{name}": row for name, row in _PROCESS.items()},
}


def sample_names(name: str, row: Row) -> dict[str, str]:
    """Under which names its samples stand on the page, and the kind of each as PromQL sees it."""
    if row.kind != "histogram":
        return {name: row.kind}
    return {f"{name}_bucket": "bucket", f"{name}_sum": "counter", f"{name}_count": "counter"}


SAMPLES = {sample: (kind, row) for name, row in TABLE.items() for sample, kind in sample_names(name, row).items()}


def read_page(page: str) -> dict[str, tuple[str, list[dict[str, str]]]]:
    """Name -> kind, and the labels of each of its series; `le` is left out."""
    found = {}
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        series = {tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le")) for sample in family.samples}
        found[name] = family.type, [dict(labels) for labels in sorted(series)]
    return found

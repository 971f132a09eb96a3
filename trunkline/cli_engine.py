"""Flags of the engine: those that `trunkline serve` and `trunkline simulate` have in common, and those of a GPU."""

import argparse
from typing import Any

from trunkline.config import EVICTION_POLICIES, KV_CACHE_DTYPES, CacheConfig, SchedulerConfig, WorkerConfig

POLICY_HELP = (
    "whose turn it is. window: who has least left to read, but nobody is overtaken by those who came 20 s later; fcfs: who came"
    " first; shortest or latency: who has least left to read; lpm or throughput: who has the longest cached prefix;"
    " dfs-weight: branch by branch of the prefix tree; priority: the request's own. Compared in docs/scheduling.md"
)

_CACHE, _SCHEDULER, _WORKER = CacheConfig(), SchedulerConfig(), WorkerConfig()
_FLAGS: dict[str, dict[str, Any]] = {
    "--block-size": {
        "type": int,
        "metavar": "N",
        "default": _CACHE.block_size,
        "help": "tokens per page of the KV cache",
    },
    "--eviction-policy": {
        "choices": EVICTION_POLICIES,
        "default": _CACHE.eviction_policy,
        "help": (
            "which cached prefixes leave first when room is needed. lru: those used least recently; lfu: those found least often; slru:"
            " those that no second request has used; priority: those of the least urgent requests. See docs/cache.md"
        ),
    },
    "--max-num-seqs": {
        "type": int,
        "metavar": "N",
        "default": _SCHEDULER.max_num_seqs,
        "help": "sequences in one step",
    },
    "--target-token-seconds": {
        "type": float,
        "metavar": "SECONDS",
        "help": (
            "wanted longest time between two tokens of a running stream: prompts are read in smaller chunks, and so more slowly, to keep"
            " it. People who read along: 0.1 to 0.2 (default: none)"
        ),
    },
    "--kv-cache-dtype": {
        "choices": KV_CACHE_DTYPES,
        "default": _CACHE.kv_cache_dtype,
        "help": (
            "how keys and values are stored, whatever the weights are. auto: as --dtype says; fp8, the same as fp8_e4m3: in half the"
            " memory of float16, less exactly, on a CPU or on GPUs of compute capability 8.9 and later"
        ),
    },
    "--gpu-memory-utilization": {
        "type": float,
        "metavar": "SHARE",
        "default": _WORKER.gpu_memory_utilization,
        "help": "of a GPU's memory: what weights, the largest step and the KV cache take together, other programs included",
    },
    "--enforce-eager": {
        "action": argparse.BooleanOptionalAction,
        "default": _WORKER.enforce_eager,
        "help": "launch every kernel of a step by itself instead of as a CUDA graph: a faster start, slower steps",
    },
    "--fairness": {
        "action": argparse.BooleanOptionalAction,
        "default": _SCHEDULER.fairness,
        "help": (
            "the tenant that was served least has its turn first, and the policy orders the requests within each tenant. Each API key is"
            " a tenant; with one tenant nothing changes"
        ),
    },
}


def add_engine_flags(group: argparse._ArgumentGroup, *flags: str) -> None:
    """Add the named ones, in this order."""
    for flag in flags:
        group.add_argument(flag, **_FLAGS[flag])

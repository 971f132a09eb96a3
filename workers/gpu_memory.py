"""How many pages of KV storage a GPU gets: what --gpu-memory-utilization leaves beside the weights and the largest step.

    |-- used by others --|-- weights --|-- largest step --|-- graphs --|-- KV pages --|-- left alone --|
    0                                                                          share × total         total

Counts bytes and pages; `measure` asks a Device what they are, the rest is arithmetic.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trunkline.config import CacheConfig
from trunkline.errors import ConfigError
from trunkline.units import format_bytes
from trunkline.workers.device import Device
from trunkline.workers.kv_format import FLOAT8
from trunkline.workers.memory import size_pool

logger = logging.getLogger("trunkline.worker")

RISKY_UTILIZATION = 0.95  # of the memory: above, what else the driver and libraries allocate may not fit


class Footprint(NamedTuple):
    """Bytes of a card before there are KV pages.

    total   all of it
    used    by others, weights and the largest step together
    graphs  what the CUDA graphs will take
    """

    total: int
    used: int
    graphs: int


def measure(device: Device, run_largest_step: Callable[[], None], captures: Sequence[Callable[[], None]]) -> Footprint:
    """Run the largest step there can be, and capture two graphs, to see what memory each takes.

    captures  one call per graph, the largest first; two are made. Empty: there are none

    What the step has allocated stays with torch's allocator, for the steps to come: it is part of `used`.
    """
    device.trim()  # of what loading the weights has left over
    run_largest_step()
    device.synchronize()
    total, free = device.memory()
    left, taken = free, []
    for capture in captures[:2]:
        capture()
        device.synchronize()
        now = device.memory().free
        taken.append(max(0, left - now))
        left = now
    return Footprint(total, total - free, graph_bytes(taken, len(captures)))


def graph_bytes(taken: Sequence[int], count: int) -> int:
    """What `count` graphs take, judged by the first two: the first brings the memory that all of them share."""
    if not taken:
        return 0
    return taken[0] + (count - 1) * taken[-1] if len(taken) > 1 else taken[0] * count


def size_gpu_pool(
    cache: CacheConfig,
    *,
    utilization: float,
    footprint: Footprint,
    page_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    name: str = "the GPU",
) -> int:
    """Number of pages, each `page_bytes` in all layers together.

    num_pages, kv_cache_memory  if given, as many as workers.memory.size_pool says
    neither                     as many as fit in `utilization` of the card beside everything else; without prefix
                                caching no more than `max_num_seqs` requests of `max_model_len` tokens can fill

    Raises ConfigError if one request of `max_model_len` tokens, and a page to grow by, would not fit.
    """
    total, used, graphs = footprint
    free = total - used - graphs
    if utilization > RISKY_UTILIZATION:
        logger.warning(
            "--gpu-memory-utilization is %g: the driver and other programs may run out of memory on %s; up to %g is safe.",
            utilization,
            name,
            RISKY_UTILIZATION,
        )
    if cache.num_pages is not None or cache.kv_cache_memory is not None:
        return size_pool(
            cache,
            page_bytes=page_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            available=max(0, free),
        )
    page_size = cache.block_size
    pages_per_request = -(-max_model_len // page_size)
    needed = pages_per_request + 1
    left = int(total * utilization) - used - graphs
    num_pages = max(0, left) // page_bytes
    if num_pages < needed:
        share = (used + graphs + needed * page_bytes) / total
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g} of {name}'s {format_bytes(total)} is"
            f" {format_bytes(int(total * utilization))}. Weights, a step of --max-num-batched-tokens"
            f" {max_num_batched_tokens} and other programs take {format_bytes(used + graphs)} of it, so the KV cache holds"
            f" {num_pages * page_size} tokens; one request of --max-model-len {max_model_len} needs {needed * page_size},"
            f" counting a page to grow by ({format_bytes(needed * page_bytes)}). Please"
            f" {_advice(cache, share, num_pages, max_num_batched_tokens)}."
        )
    if not cache.enable_prefix_caching:
        num_pages = min(num_pages, max_num_seqs * pages_per_request + 1)
    return num_pages


def _advice(cache: CacheConfig, share: float, num_pages: int, max_num_batched_tokens: int) -> str:
    """What would do, the easiest first."""
    advice = []
    percent = -(-int(share * 1000 + 1) // 10)  # rounded up, so that following the advice works
    if percent <= 100 * RISKY_UTILIZATION:
        advice.append(f"raise --gpu-memory-utilization to {percent / 100:g}")
    if num_pages > 1:
        advice.append(f"lower --max-model-len to {(num_pages - 1) * cache.block_size} or less")
    if cache.kv_cache_dtype not in FLOAT8:
        advice.append("store the cache in half the memory with --kv-cache-dtype fp8")
    if not advice or num_pages <= 1:
        advice.append(f"lower --max-num-batched-tokens below {max_num_batched_tokens}, or take a smaller model")
    return ", or ".join(advice)

"""How many pages of KV storage and host slots there are: what was asked for, or a share of what is available.

Counts bytes and pages; knows no model and allocates nothing.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from trunkline.config import CacheConfig
from trunkline.errors import ConfigError
from trunkline.units import format_bytes

DEFAULT_KV_CACHE_MEMORY = 4 * 2**30  # bytes, on a CPU; less where that is more than half of the memory available
STAGING_MEMORY = 512 * 2**20  # bytes of host memory between device and disk
MIN_STAGING_PAGES = 16


def size_pool(
    cache: CacheConfig, *, page_bytes: int, max_model_len: int, max_num_seqs: int, available: int, num_ranks: int = 1
) -> int:
    """Number of pages, each `page_bytes` in all layers together.

    num_pages          if given, that many
    kv_cache_memory    if given, as many as fit in so many bytes
    neither            as many as fit in 4 GiB, of all `num_ranks` together, and in half of the `available` bytes; without prefix
                       caching no more than `max_num_seqs` requests of `max_model_len` tokens can fill

    `page_bytes`, `available` and --kv-cache-memory are of one rank.

    Raises ConfigError if one request of `max_model_len` tokens, and a page to grow by, would not fit, or if the pages
    would not fit in the memory available.
    """
    page_size = cache.block_size
    pages_per_request = -(-max_model_len // page_size)
    if cache.num_pages is not None:
        num_pages, origin = cache.num_pages, "as asked for"
    elif cache.kv_cache_memory is not None:
        num_pages = cache.kv_cache_memory // page_bytes
        origin = f"what fits in --kv-cache-memory {format_bytes(cache.kv_cache_memory)}"
    else:
        memory = min(DEFAULT_KV_CACHE_MEMORY // num_ranks, available // 2)
        num_pages = memory // page_bytes
        if not cache.enable_prefix_caching:
            num_pages = min(num_pages, max_num_seqs * pages_per_request + 1)
        of_all = " of all ranks together" if num_ranks > 1 else ""
        origin = f"what fits in {format_bytes(memory)}: by default half of the memory available, at most 4 GiB{of_all}"
    needed = pages_per_request + 1
    if num_pages < needed:
        advice = []
        if needed * page_bytes <= available:
            advice.append(f"raise --kv-cache-memory to {-(-needed * page_bytes // 2**20)}MiB or more")
        if num_pages > 1:
            advice.append(f"lower --max-model-len to {(num_pages - 1) * page_size} or less")
        raise ConfigError(
            f"The KV cache holds {num_pages * page_size} tokens ({origin}), but one request of --max-model-len"
            f" {max_model_len} needs {needed * page_size}, counting a page to grow by."
            f" Please {' or '.join(advice) or 'free some memory'}."
        )
    if num_pages * page_bytes > available:
        raise ConfigError(
            f"The KV cache of {num_pages * page_size} tokens takes {format_bytes(num_pages * page_bytes)}, but only"
            f" {format_bytes(available)} of memory is available. Please lower --kv-cache-memory."
        )
    return num_pages


def size_host_tier(cache: CacheConfig, *, page_bytes: int, available: int) -> int:
    """Number of host slots, each of one page.

    host_cache_memory   if given, as many as fit in so many bytes
    disk_cache_dir      if given alone, enough to pass pages through: STAGING_MEMORY, or an eighth of the `available`
                        bytes if that is less
    neither             none

    Raises ConfigError if not even one page fits, or if they would not fit in the memory available.
    """
    if cache.host_cache_memory is not None:
        memory = cache.host_cache_memory
        if memory < page_bytes:
            raise ConfigError(
                f"--host-cache-memory is {format_bytes(memory)}; one page of this model takes {format_bytes(page_bytes)}."
                " Please raise it."
            )
        if memory > available:
            raise ConfigError(
                f"--host-cache-memory is {format_bytes(memory)}, but beside the KV cache only {format_bytes(max(0, available))}"
                " of memory is available. Please lower it, or --kv-cache-memory."
            )
        return memory // page_bytes
    if cache.disk_cache_dir is None:
        return 0
    return max(MIN_STAGING_PAGES, min(STAGING_MEMORY, available // 8) // page_bytes)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still use without swapping: the kernel's estimate, or what its cgroups leave."""
    try:
        meminfo = _numbers((root / "proc/meminfo").read_text(encoding="utf-8"))
    except FileNotFoundError:  # not Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(meminfo["MemAvailable"] * 1024, *_left_in_cgroups(root), 2**63))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """What each memory limit over this process leaves: a limit holds for the group and for all groups inside it.

    Both hierarchies of cgroups(7): version 2, and the memory controller of version 1.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            if (left := _left_in(mount / folder, *names)) is not None:
                yield left


def _left_in(folder: Path, limit_name: str, usage_name: str, inactive_name: str) -> int | None:
    """Limit less usage, where file pages that the kernel can drop (a checkpoint just read) don't count as used."""
    try:
        limit = (folder / limit_name).read_text(encoding="utf-8").strip()
        usage = int((folder / usage_name).read_text(encoding="utf-8"))
        inactive = _numbers((folder / "memory.stat").read_text(encoding="utf-8")).get(inactive_name, 0)
    except OSError:  # the root group has no limit, and a container doesn't see the groups around it
        return None
    return None if limit == "max" else int(limit) - usage + inactive


def _numbers(text: str) -> dict[str, int]:
    """{"MemTotal": 24683652, …} from lines such as "MemTotal: 24683652 kB" or "inactive_file 4096"."""
    fields = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) >= 2}

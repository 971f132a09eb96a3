"""How many pages there are, and how much memory is left for them, read from made-up /proc and /sys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.config import CacheConfig
from trunkline.errors import ConfigError
from trunkline.units import parse_bytes
from trunkline.workers.memory import MIN_STAGING_PAGES, available_memory, size_host_tier, size_pool

GIB = 2**30


def pool(*, page_bytes=2**20, max_model_len=1024, max_num_seqs=256, available=64 * GIB, num_ranks=1, **cache) -> int:
    """Pages of 16 tokens and 1 MiB, unless told otherwise."""
    return size_pool(
        CacheConfig(**cache),
        page_bytes=page_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        available=available,
        num_ranks=num_ranks,
    )


def test_as_many_pages_as_asked_for():
    assert pool(num_pages=70, kv_cache_memory=GIB) == 70


def test_as_many_pages_as_fit_in_the_memory_asked_for():
    assert pool(kv_cache_memory=GIB) == 1024
    assert pool(kv_cache_memory=GIB - 1) == 1023


def test_by_default_four_gib():
    assert pool() == 4096


def test_by_default_four_gib_of_all_ranks_together():
    one_rank = {"page_bytes": 3 * 2**20, "available": 96 * GIB}
    each = {"page_bytes": 2**20, "available": 32 * GIB, "num_ranks": 3}
    assert pool(**each) == pool(**one_rank) == 1365
    assert pool(**{**each, "kv_cache_memory": GIB}) == 1024, "what is asked for is of each"


def test_by_default_no_more_than_half_of_what_is_available():
    assert pool(available=3 * GIB) == 1536


def test_without_prefix_caching_no_more_than_requests_can_fill():
    few = {"max_num_seqs": 4, "max_model_len": 1000}
    assert pool(**few, enable_prefix_caching=False) == 4 * 63 + 1
    assert pool(**few) == 4096, "the cache has use for more than those that run"
    assert pool(**few, enable_prefix_caching=False, kv_cache_memory=GIB) == 1024, "what is asked for is given"


def test_a_pool_too_small_for_one_request_says_what_would_do():
    with pytest.raises(ConfigError) as refused:
        pool(kv_cache_memory=8 * 2**20)
    assert str(refused.value) == (
        "The KV cache holds 128 tokens (what fits in --kv-cache-memory 8.0 MiB), but one request of --max-model-len 1024"
        " needs 1040, counting a page to grow by. Please raise --kv-cache-memory to 65MiB or more or lower --max-model-len"
        " to 112 or less."
    )


def test_advice_is_only_given_where_it_helps():
    with pytest.raises(ConfigError, match=r"Please lower --max-model-len to 496 or less\.$"):
        pool(available=64 * 2**20)
    with pytest.raises(ConfigError, match=r"Please free some memory\.$"):
        pool(available=2**20)


@given(
    page_bytes=st.integers(1, 2**22),
    max_model_len=st.integers(1, 100_000),
    memory=st.integers(1, 2**34),
    block_size=st.sampled_from([1, 7, 16, 32]),
)
def test_following_the_advice_works(page_bytes, max_model_len, memory, block_size):
    def attempt(memory, max_model_len):
        return pool(
            page_bytes=page_bytes,
            max_model_len=max_model_len,
            kv_cache_memory=memory,
            block_size=block_size,
            available=2**50,
        )

    try:
        assert attempt(memory, max_model_len) * block_size >= max_model_len + block_size
    except ConfigError as refused:
        words = str(refused).split()
        attempt(parse_bytes(words[words.index("raise") + 3]), max_model_len)
        if "lower" in words:
            attempt(memory, int(words[words.index("lower") + 3]))


def test_a_pool_larger_than_the_memory_is_refused():
    with pytest.raises(ConfigError, match=r"takes 3\.0 GiB, but only 2\.0 GiB of memory is available"):
        pool(kv_cache_memory=3 * GIB, available=2 * GIB)


# What is available.


@pytest.fixture
def machine(tmp_path):
    """Writes files of a made-up machine: 8 GiB of memory, 6 of it available."""

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write(
        "proc/meminfo",
        "MemTotal:        8388608 kB\nMemFree:         1000000 kB\nMemAvailable:    6291456 kB\nHugePages_Total:  0\n",
    )
    write.root = tmp_path
    return write


def test_without_cgroups_the_kernels_estimate(machine):
    assert available_memory(machine.root) == 6 * GIB


def test_without_limits_the_kernels_estimate(machine):
    machine("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")
    machine("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    machine("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "4096\n")
    machine("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 0\n")
    assert available_memory(machine.root) == 6 * GIB


@pytest.mark.parametrize(("limit", "left"), [(2 * GIB, GIB + 4096), ("max", 6 * GIB), (GIB // 2, 0)])
def test_a_limit_of_cgroups_2(machine, limit, left):
    """Dropping 4,096 bytes of cached files frees them; a limit below the usage leaves nothing."""
    machine("proc/self/cgroup", "0::/job.slice\n")
    machine("sys/fs/cgroup/job.slice/memory.max", f"{limit}\n")
    machine("sys/fs/cgroup/job.slice/memory.current", f"{GIB}\n")
    machine("sys/fs/cgroup/job.slice/memory.stat", "anon 1\nfile 9000\ninactive_file 4096\n")
    assert available_memory(machine.root) == left


def test_a_limit_on_the_group_around(machine):
    machine("proc/self/cgroup", "0::/pod/container\n")
    for group, limit in (("pod", f"{3 * GIB}"), ("pod/container", "max")):
        machine(f"sys/fs/cgroup/{group}/memory.max", limit)
        machine(f"sys/fs/cgroup/{group}/memory.current", "0")
        machine(f"sys/fs/cgroup/{group}/memory.stat", "inactive_file 0")
    assert available_memory(machine.root) == 3 * GIB


def test_a_limit_of_cgroups_1_seen_from_inside_a_container(machine):
    machine("proc/self/cgroup", "4:memory:/docker/0123\n")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB}")
    machine("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB // 2}")
    machine("sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 1024\n")
    assert available_memory(machine.root) == GIB // 2 + 1024


def test_this_machine_has_memory():
    assert available_memory() > 2**20


def test_a_machine_without_proc_counts_all_of_its_memory(tmp_path):
    assert available_memory(tmp_path) > 2**20


# Host memory behind the pool.


def slots(*, page_bytes=2**20, available=64 * GIB, **cache) -> int:
    return size_host_tier(CacheConfig(**cache), page_bytes=page_bytes, available=available)


def test_no_host_tier_unless_asked_for():
    assert slots() == 0


def test_host_tier_as_asked_for():
    assert slots(host_cache_memory=10 * 2**20 + 5) == 10


def test_a_disk_tier_gets_memory_to_pass_pages_through(tmp_path):
    assert slots(disk_cache_dir="kv") == 512
    assert slots(disk_cache_dir="kv", available=GIB) == 128, "an eighth of what is there"
    assert slots(disk_cache_dir="kv", page_bytes=2**30) == MIN_STAGING_PAGES
    assert slots(disk_cache_dir="kv", host_cache_memory=2**20) == 1


@pytest.mark.parametrize(
    ("memory", "told"),
    [(2**20 - 1, "one page of this model takes 1.0 MiB"), (2 * GIB, "only 1.0 GiB of memory is available")],
)
def test_host_tier_that_cannot_be(memory, told):
    with pytest.raises(ConfigError, match=f"--host-cache-memory is .*{told}"):
        slots(host_cache_memory=memory, available=GIB)

"""How many pages a GPU gets: arithmetic on made-up cards, and what is measured on a fake one."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fake_device import FakeDevice
from trunkline.config import CacheConfig
from trunkline.errors import ConfigError
from trunkline.workers.gpu_memory import Footprint, graph_bytes, measure, size_gpu_pool

GIB, MIB = 2**30, 2**20


def pool(
    *, utilization=0.9, total=100 * GIB, used=20 * GIB, graphs=0, max_model_len=1024, max_num_seqs=256, **cache
) -> int:
    """Pages of 16 tokens and 1 MiB on a card of 100 GiB, of which weights and a step take 20, unless told otherwise."""
    return size_gpu_pool(
        CacheConfig(**cache),
        utilization=utilization,
        footprint=Footprint(total, used, graphs),
        page_bytes=MIB,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        name="NVIDIA H200",
    )


def test_the_share_of_the_card_less_what_else_is_there():
    assert pool() == 70 * 1024
    assert pool(utilization=0.5) == 30 * 1024
    assert pool(graphs=2 * GIB) == 68 * 1024


def test_as_asked_for():
    assert pool(kv_cache_memory=GIB) == 1024, "whatever the share"
    assert pool(kv_cache_memory=GIB, utilization=0.1) == 1024
    assert pool(num_pages=70) == 70


def test_what_is_asked_for_must_fit_in_what_is_free():
    with pytest.raises(ConfigError, match=r"takes 90\.0 GiB, but only 80\.0 GiB of memory is available"):
        pool(kv_cache_memory=90 * GIB)
    with pytest.raises(ConfigError, match=r"raise --kv-cache-memory to 65MiB"):
        pool(kv_cache_memory=8 * MIB)


def test_without_prefix_caching_no_more_than_requests_can_fill():
    assert pool(max_num_seqs=4, enable_prefix_caching=False) == 4 * 64 + 1


def test_above_095_warns(caplog):
    with caplog.at_level(logging.WARNING):
        pool(utilization=0.95)
        assert not caplog.records
        pool(utilization=0.96)
    assert "--gpu-memory-utilization is 0.96" in caplog.text and "NVIDIA H200" in caplog.text


def test_too_little_for_one_request_says_what_would_do():
    with pytest.raises(ConfigError) as refused:
        pool(used=int(89.99 * GIB))
    assert str(refused.value) == (
        "--gpu-memory-utilization 0.9 of NVIDIA H200's 100.0 GiB is 90.0 GiB. Weights, a step of --max-num-batched-tokens 8192"
        " and other programs take 90.0 GiB of it, so the KV cache holds 160 tokens; one request of --max-model-len 1024 needs"
        " 1040, counting a page to grow by (65.0 MiB). Please raise --gpu-memory-utilization to 0.91, or lower --max-model-len"
        " to 144 or less, or store the cache in half the memory with --kv-cache-dtype fp8."
    )


def test_weights_that_leave_nothing():
    with pytest.raises(
        ConfigError, match=r"holds 0 tokens.*lower --max-num-batched-tokens below 8192, or take a smaller model"
    ):
        pool(used=99 * GIB, kv_cache_dtype="fp8")


@given(
    used=st.integers(0, 100 * GIB),
    graphs=st.integers(0, 4 * GIB),
    utilization=st.floats(0.05, 1),
    max_model_len=st.integers(1, 1_000_000),
)
def test_pages_fit_and_following_the_advice_works(used, graphs, utilization, max_model_len):
    def attempt(utilization, max_model_len):
        return pool(used=used, graphs=graphs, utilization=utilization, max_model_len=max_model_len)

    try:
        num_pages = attempt(utilization, max_model_len)
    except ConfigError as refused:
        words = str(refused).replace(",", "").split()
        if "raise" in words:
            attempt(float(words[words.index("raise") + 3].rstrip(".")), max_model_len)
        if "--max-model-len" in words[words.index("Please") :]:
            attempt(utilization, int(words[words.index("lower") + 3]))
    else:
        assert num_pages * 16 >= max_model_len + 16
        assert used + graphs + num_pages * MIB <= utilization * 100 * GIB


def test_graphs_are_judged_by_the_first_two():
    assert graph_bytes([], 0) == 0
    assert graph_bytes([7], 1) == 7
    assert graph_bytes([100, 3], 9) == 100 + 8 * 3


def test_what_is_measured():
    """Weights take 30, others 10, the step 5, the first graph 4, the others 1 each; two are captured."""
    device = FakeDevice(total=100)
    device.used, captured = 40, []

    def step():
        device.launch(lambda: setattr(device, "used", device.used + 5))

    def capture(size):
        captured.append(size)
        device.used += 4 if len(captured) == 1 else 1

    captures = [lambda size=size: capture(size) for size in (8, 4, 2, 1)]
    assert measure(device, step, captures) == Footprint(total=100, used=45, graphs=4 + 3)
    assert captured == [8, 4]
    device.used = 40
    assert measure(device, step, []) == Footprint(100, 45, 0)


def test_memory_that_others_give_back_meanwhile_is_no_negative_graph():
    device = FakeDevice(total=100)
    device.used = 40
    assert measure(device, lambda: None, [lambda: setattr(device, "used", 30)]).graphs == 0

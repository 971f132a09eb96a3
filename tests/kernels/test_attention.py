"""Paged attention: right by a float64 oracle, and the same bits however the work is cut up."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.factories import KV_DTYPES, STORAGE, TARGETS, THIS_MACHINE, Heads, Requests, assert_close, compiled
from trunkline.errors import ConfigError
from trunkline.kernels import build
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import KvPages
from trunkline.kernels.reference import ReferenceKernels
from trunkline.step import SPLIT, SharedRun

FLOAT8 = torch.float8_e4m3fn
ORACLE = ReferenceKernels(torch.float64)
BORDERS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 511, 512, 513, 1023, 1024, 1025, 1100]  # of vectors, pages and splits


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query", "kv", "dim", "page_size"),
    [(9, 3, 64, 16), (4, 4, 8, 8), (8, 1, 96, 32), (3, 1, 128, 64), (2, 2, 256, 16), (30, 1, 24, 8), (5, 5, 40, 512)],
)
def test_equals_the_oracle(target: str, dtype: torch.dtype, query: int, kv: int, dim: int, page_size: int) -> None:
    requests = Requests([1, 5, 16, 530, 1100], Heads(query=query, kv=kv, dim=dim), page_size=page_size)
    chunks = [(0, 0, 1), (1, 2, 5), (2, 15, 16), (3, 500, 530), (4, 1099, 1100)]
    outputs = []
    for kernels in (compiled(target), ORACLE):
        pages = requests.allocate(kernels, torch.float64 if kernels is ORACLE else dtype)
        requests.attend(kernels, pages, requests.everything())
        outputs.append(requests.attend(kernels, pages, chunks))
    assert_close(outputs[0], outputs[1], max(STORAGE[dtype], 3e-6))


def as_oracle(pages: KvPages) -> KvPages:
    """The same numbers as the oracle lays them out."""
    keys, values = pages.keys.double().permute(0, 1, 4, 2, 3), pages.values.double().permute(0, 1, 3, 2, 4)
    return dataclasses.replace(pages, keys=keys.contiguous(), values=values.contiguous())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(("query", "kv", "dim", "page_size"), [(9, 3, 64, 16), (5, 5, 24, 8), (6, 1, 40, 128)])
def test_what_is_stored_is_computed_with_exactly(
    target: str, dtype: torch.dtype, query: int, kv: int, dim: int, page_size: int
) -> None:
    """However coarse the pages are, what is read from them is what the oracle reads."""
    kernels, requests = compiled(target), Requests([9, 1100], Heads(query=query, kv=kv, dim=dim), page_size=page_size)
    pages = requests.allocate(kernels, dtype)
    ours = requests.attend(kernels, pages, requests.everything())
    oracle = requests.attend(ORACLE, as_oracle(pages), requests.everything(), store=False)
    assert_close(ours, oracle, 3e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_every_float8_number_is_read_exactly(target: str) -> None:
    """A request of one token gets its value as it is."""
    kernels, requests = compiled(target), Requests([1], Heads(query=1, kv=1, dim=256))
    pages = requests.allocate(kernels, FLOAT8)
    requests.attend(kernels, pages, requests.everything())
    codes = torch.arange(256, dtype=torch.uint8)
    codes[0xFF] = 0  # NaN is always stored as 0x7f
    pages.values[1, requests.page_table[0, 0], 0, 0] = codes.view(FLOAT8)
    out = requests.attend(kernels, pages, requests.everything(), store=False)
    torch.testing.assert_close(out[0], codes.view(FLOAT8).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("query", "kv", "dtype"),
    [
        (6, 2, torch.float16),
        (2, 2, torch.float32),
        (5, 1, torch.float16),
        (30, 1, torch.float32),
        (6, 2, FLOAT8),
        (5, 5, FLOAT8),
        (7, 1, FLOAT8),
    ],
)
def test_a_row_alone_in_a_tile_and_in_a_batch(target: str, query: int, kv: int, dtype: torch.dtype) -> None:
    """Bit for bit, also where many rows are cut into tiles and one row's splits are spread over the threads."""
    kernels, requests = compiled(target), Requests(BORDERS, Heads(query=query, kv=kv, dim=40))
    pages = requests.allocate(kernels, dtype)
    together = requests.attend(kernels, pages, requests.everything())
    assert together.isfinite().all()
    row = 0
    for request, context in enumerate(BORDERS):
        positions = {0, context // 2, *(border - 1 for border in BORDERS if border <= context)}
        for position in sorted(positions):
            alone = requests.attend(kernels, pages, [(request, position, position + 1)], store=False)
            assert torch.equal(alone[0], together[row + position]), f"request of {context}, position {position}"
        row += context


@given(data=st.data())
def test_chunks_do_not_matter(data: st.DataObject) -> None:
    """A prompt read in chunks, beside other requests, gives the bits of the prompt read at once."""
    kernels, dtype = compiled(), data.draw(st.sampled_from(KV_DTYPES))
    contexts = data.draw(st.lists(st.integers(1, 90) | st.sampled_from(BORDERS), min_size=1, max_size=3))
    page_size = data.draw(st.sampled_from([8, 16, 32]))
    requests = Requests(contexts, Heads(query=3, kv=1, dim=8), page_size=page_size)
    at_once = [requests.attend(kernels, requests.allocate(kernels, dtype), [chunk]) for chunk in requests.everything()]
    cuts = [sorted({0, context, *data.draw(st.lists(st.integers(0, context), max_size=4))}) for context in contexts]
    pages = requests.allocate(kernels, dtype)
    for step in range(max(map(len, cuts)) - 1):
        chunks = [(request, cut[step], cut[step + 1]) for request, cut in enumerate(cuts) if step + 1 < len(cut)]
        out = requests.attend(kernels, pages, chunks)
        for (request, first, last), rows in zip(
            chunks, out.split([last - first for _, first, last in chunks]), strict=True
        ):
            assert torch.equal(rows, at_once[request][first:last]), (contexts, cuts)


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_threads_do_not_matter(dtype: torch.dtype) -> None:
    requests = Requests([1100, 30, 700], Heads(query=2, kv=1))
    outputs = []
    for threads in (1, 2, 5):
        kernels = compiled(threads=threads)
        pages = requests.allocate(kernels, dtype)
        rows = requests.attend(kernels, pages, requests.everything())
        outputs.append([rows, requests.attend(kernels, pages, [(0, 1099, 1100)])])
    for other in outputs[1:]:
        assert all(map(torch.equal, outputs[0], other))


def level(requests: Iterable[int], first: int, last: int) -> SharedRun:
    """Splits first … last - 1, shared by these requests."""
    return SharedRun(np.array(list(requests), np.int32), first * SPLIT, last * SPLIT)


# Three levels, a run of two splits, a request that shares nothing, and a second tree.
TREE = [level([0, 1, 2, 3, 4], 0, 1), level([0, 1, 3], 1, 3), level([0, 3], 3, 4), level([6, 7], 0, 2)]
CONTEXTS = [2060, 1540, 513, 2200, 700, 600, 1025, 1100]
# They decode, are verified, read a chunk; request 4 shares nothing while it reads what it has in common.
STEP = [
    (7, 1099, 1100),
    (0, 2059, 2060),
    (3, 2190, 2200),
    (1, 1537, 1540),
    (4, 500, 516),
    (5, 599, 600),
    (6, 1024, 1025),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("query", "kv", "dim", "page_size", "dtype", "window"),
    [
        (9, 3, 64, 16, torch.float16, 0),
        (4, 4, 24, 8, torch.float32, 0),
        (30, 1, 8, 64, torch.float16, 0),
        (60, 1, 8, 16, torch.float32, 0),
        (6, 2, 40, 512, torch.float16, 700),
        (3, 1, 16, 32, torch.float32, 1),
        (9, 3, 64, 16, FLOAT8, 0),
        (60, 1, 8, 8, FLOAT8, 0),
        (4, 2, 40, 64, FLOAT8, 700),
    ],
)
def test_what_is_shared_does_not_matter(
    target: str, threads: int, query: int, kv: int, dim: int, page_size: int, dtype: torch.dtype, window: int
) -> None:
    """Read once for all, the bits are those of everybody reading for himself, and of everybody alone."""
    kernels = compiled(target, threads)
    requests = Requests(CONTEXTS, Heads(query=query, kv=kv, dim=dim), page_size=page_size, shared=TREE)
    pages = requests.allocate(kernels, dtype)
    for chunk in requests.everything():
        requests.attend(kernels, pages, [chunk], window=window)
    assert len(requests.batch(STEP, grouped=True).runs) == 4
    grouped = requests.attend(kernels, pages, STEP, store=False, grouped=True, window=window)
    assert torch.equal(grouped, requests.attend(kernels, pages, STEP, store=False, window=window))
    assert torch.equal(
        grouped, requests.attend(compiled(target, 2), pages, STEP, store=False, grouped=True, window=window)
    )
    alone = [requests.attend(kernels, pages, [chunk], store=False, window=window) for chunk in STEP]
    assert torch.equal(grouped, torch.cat(alone))


@pytest.mark.parametrize("readers", [2, 15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float16, FLOAT8], ids=str)
def test_a_crowd_shares_a_prompt(readers: int, dtype: torch.dtype) -> None:
    """Tiles that are full, and those that are not."""
    crowd = Requests(
        [520 + i for i in range(readers)], Heads(query=3, kv=1, dim=8), shared=[level(range(readers), 0, 1)]
    )
    pages, step = crowd.allocate(compiled(), dtype), [(i, 519 + i, 520 + i) for i in range(readers)]
    crowd.attend(compiled(), pages, crowd.everything())
    flat = crowd.attend(compiled(), pages, step, store=False)
    for threads in (1, 3):
        assert torch.equal(crowd.attend(compiled(threads=threads), pages, step, store=False, grouped=True), flat)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[SharedRun]]:
    """Contexts of some requests, and what they share: groups of the readers of one split share the next."""
    contexts = draw(st.lists(st.integers(1, 1700), min_size=2, max_size=7))
    runs, groups = [], [list(range(len(contexts)))]
    for split in range(3):
        parts = []
        for group in groups:
            names = {request: draw(st.integers(0, 2)) for request in group if contexts[request] > (split + 1) * SPLIT}
            parts += [[request for request in names if names[request] == name] for name in range(3)]
        groups = [part for part in parts if len(part) > 1]
        runs += [level(group, split, split + 1) for group in groups]
    return contexts, runs


@given(data=st.data(), tree=trees())
@settings(deadline=None)
def test_random_trees(data: st.DataObject, tree: tuple[list[int], list[SharedRun]]) -> None:
    contexts, shared = tree
    threads, window = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([0, 0, 1, 40, 600, 1200]))
    heads, page_size = (
        Heads(query=data.draw(st.sampled_from([1, 3, 7])), kv=1, dim=8),
        data.draw(st.sampled_from([8, 64])),
    )
    requests, kernels = Requests(contexts, heads, page_size=page_size, shared=shared), compiled(threads=threads)
    pages = requests.allocate(kernels, data.draw(st.sampled_from(KV_DTYPES)))
    whole = requests.attend(kernels, pages, requests.everything(), window=window).split(contexts)
    order = data.draw(st.permutations(range(len(contexts))))
    step = [(r, contexts[r] - data.draw(st.integers(1, min(contexts[r], 20))), contexts[r]) for r in order]
    grouped = requests.attend(kernels, pages, step, store=False, grouped=True, window=window)
    assert torch.equal(grouped, torch.cat([whole[request][first:last] for request, first, last in step]))


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 300])
def test_a_small_workspace_does_not_matter(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """What does not fit at once is folded before more is computed."""
    flags = build.TARGET_FLAGS[THIS_MACHINE]
    requests, outputs = Requests([4000, 3000], Heads(query=2, kv=1, dim=8)), []
    for name, limit in (("usual", 8 << 20), ("small", 6 * 2 * 10 * 4), ("none", 1)):
        monkeypatch.setitem(build.TARGET_FLAGS, name, (*flags, f"-DPARTIAL_BYTES={limit}"))
        kernels = compiled(name, 3)
        pages = requests.allocate(kernels, torch.float16)
        requests.attend(kernels, pages, requests.everything(), window=window)
        step = [(0, 3999, 4000), (1, 2998, 3000)]
        outputs.append(requests.attend(kernels, pages, step, store=False, window=window))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(1, 0.0), (7, 0.0), (200, 0.0), (512, 0.0), (513, 0.0), (5000, 0.0), (0, 2.0), (300, 30.0)]
)
def test_window_and_soft_cap(target: str, window: int, soft_cap: float) -> None:
    """Right by the oracle, and the same bits alone as in a prompt read at once."""
    requests, outputs = Requests([1100, 40], Heads(query=4, kv=2, dim=16)), []
    requests.qkv[0] *= 3  # scores far beyond a soft cap, too
    for kernels, dtype in ((compiled(target), torch.float32), (ORACLE, torch.float64)):
        pages = requests.allocate(kernels, dtype)
        all_rows = requests.everything()
        outputs.append(requests.attend(kernels, pages, all_rows, window=window, soft_cap=soft_cap))
        if kernels is not ORACLE:
            for position in (0, 511, 512, 711, 1023, 1024, 1099):
                chunk = (0, position, position + 1)
                alone = requests.attend(kernels, pages, [chunk], store=False, window=window, soft_cap=soft_cap)
                assert torch.equal(alone[0], outputs[0][position]), position
    assert_close(outputs[0], outputs[1], 2e-5)


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_what_lies_behind_a_window_is_not_read(dtype: torch.dtype) -> None:
    requests = Requests([1100], Heads(), page_size=8)
    pages = requests.allocate(compiled(), dtype)
    requests.attend(compiled(), pages, requests.everything())
    expected = requests.attend(compiled(), pages, [(0, 1099, 1100)], store=False, window=100)
    gone = torch.from_numpy(requests.page_table[0, :125]).long()  # tokens 0 to 999 are out of sight
    pages.keys[:, gone] = pages.values[:, gone] = math.nan
    assert torch.equal(requests.attend(compiled(), pages, [(0, 1099, 1100)], store=False, window=100), expected)


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_page_size_does_not_matter(dtype: torch.dtype) -> None:
    """The same sums in the same order, whatever the pages."""
    outputs = []
    for page_size in (8, 16, 64, 512):
        requests = Requests([600], Heads(), page_size=page_size)
        outputs.append(requests.attend(compiled(), requests.allocate(compiled(), dtype), requests.everything()))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_extreme_scores() -> None:
    """One token may weigh everything, and scores beyond the range of exp are no trouble."""
    requests = Requests([40], Heads(query=1, kv=1, dim=8))
    requests.qkv[0][:, :16] *= 100
    outputs = []
    for kernels, dtype in ((compiled(), torch.float32), (ORACLE, torch.float64)):
        outputs.append(requests.attend(kernels, requests.allocate(kernels, dtype), requests.everything()))
    assert_close(outputs[0], outputs[1], 1e-3)  # scores of some thousands have an absolute error of some thousandths


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_a_nan_stays_in_its_request(dtype: torch.dtype, nan: float) -> None:
    requests = Requests([20, 20], Heads())
    requests.qkv[0][10] = nan
    out = requests.attend(compiled(), requests.allocate(compiled(), dtype), requests.everything())
    assert out[10:20].isnan().all(), "a NaN in K or V must show"
    assert out[20:].isfinite().all()


def test_beside_bfloat16_weights_pages_are_float16() -> None:
    requests = Requests([20], Heads())
    outputs = []
    for dtype in (torch.bfloat16, torch.float16):
        pages = requests.allocate(compiled(), dtype)
        assert pages.keys.dtype == pages.values.dtype == torch.float16
        outputs.append(requests.attend(compiled(), pages, requests.everything()))
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 65504.0), (FLOAT8, 448.0)])
def test_large_values_stay_finite(dtype: torch.dtype, largest: float) -> None:
    requests = Requests([4], Heads())
    requests.qkv[0][:, -Heads().kv * Heads().dim :] = 1e6
    for kernels in (compiled(), ReferenceKernels()):
        out = requests.attend(kernels, requests.allocate(kernels, dtype), requests.everything())
        torch.testing.assert_close(out, torch.full_like(out, largest))


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_pages_may_be_stored_otherwise_than_weights(dtype: torch.dtype) -> None:
    """Whatever the weights are, pages are what the kernels were made with."""
    requests, outputs = Requests([20], Heads()), []
    for kernels in (CpuKernels(1, kv_dtype=dtype), ReferenceKernels(kv_dtype=dtype)):
        for weights in (torch.float32, torch.bfloat16):
            pages = requests.allocate(kernels, weights)
            assert pages.keys.dtype == pages.values.dtype == kernels.kv_dtype(weights) == dtype
            outputs.append(requests.attend(kernels, pages, requests.everything()))
    assert torch.equal(outputs[0], outputs[1])
    assert_close(outputs[0], outputs[2].double(), 1e-3)


def test_page_sizes_it_cannot_do_are_refused() -> None:
    for page_size in (4, 12, 1024):
        with pytest.raises(ConfigError, match=f"--block-size is {page_size}; allowed are 8, 16"):
            Requests([1], Heads(), page_size=page_size).allocate(compiled(), torch.float32)

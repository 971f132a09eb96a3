"""Paged attention: right by a float64 oracle, and the same bits however the work is cut up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.factories import STORAGE, TARGETS, Heads, Requests, assert_close, compiled
from trunkline.errors import ConfigError
from trunkline.kernels.reference import ReferenceKernels

ORACLE = ReferenceKernels(torch.float64)
BORDERS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 511, 512, 513, 1023, 1024, 1025, 1100]  # of vectors, pages and splits


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("query", "kv", "dtype"),
    [(6, 2, torch.float16), (2, 2, torch.float32), (5, 1, torch.float16), (30, 1, torch.float32)],
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
    kernels = compiled()
    contexts = data.draw(st.lists(st.integers(1, 90) | st.sampled_from(BORDERS), min_size=1, max_size=3))
    page_size = data.draw(st.sampled_from([8, 16, 32]))
    requests = Requests(contexts, Heads(query=3, kv=1, dim=8), page_size=page_size)
    at_once = [
        requests.attend(kernels, requests.allocate(kernels, torch.float16), [chunk]) for chunk in requests.everything()
    ]
    cuts = [sorted({0, context, *data.draw(st.lists(st.integers(0, context), max_size=4))}) for context in contexts]
    pages = requests.allocate(kernels, torch.float16)
    for step in range(max(map(len, cuts)) - 1):
        chunks = [(request, cut[step], cut[step + 1]) for request, cut in enumerate(cuts) if step + 1 < len(cut)]
        out = requests.attend(kernels, pages, chunks)
        for (request, first, last), rows in zip(
            chunks, out.split([last - first for _, first, last in chunks]), strict=True
        ):
            assert torch.equal(rows, at_once[request][first:last]), (contexts, cuts)


def test_threads_do_not_matter() -> None:
    requests = Requests([1100, 30, 700], Heads(query=2, kv=1))
    outputs = []
    for threads in (1, 2, 5):
        kernels = compiled(threads=threads)
        pages = requests.allocate(kernels, torch.float16)
        rows = requests.attend(kernels, pages, requests.everything())
        outputs.append([rows, requests.attend(kernels, pages, [(0, 1099, 1100)])])
    for other in outputs[1:]:
        assert all(map(torch.equal, outputs[0], other))


def test_page_size_does_not_matter() -> None:
    """The same sums in the same order, whatever the pages."""
    outputs = []
    for page_size in (8, 16, 64, 512):
        requests = Requests([600], Heads(), page_size=page_size)
        outputs.append(requests.attend(compiled(), requests.allocate(compiled(), torch.float16), requests.everything()))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_extreme_scores() -> None:
    """One token may weigh everything, and scores beyond the range of exp are no trouble."""
    requests = Requests([40], Heads(query=1, kv=1, dim=8))
    requests.qkv[0][:, :16] *= 100
    outputs = []
    for kernels, dtype in ((compiled(), torch.float32), (ORACLE, torch.float64)):
        outputs.append(requests.attend(kernels, requests.allocate(kernels, dtype), requests.everything()))
    assert_close(outputs[0], outputs[1], 1e-3)  # scores of some thousands have an absolute error of some thousandths


def test_a_nan_stays_in_its_request() -> None:
    requests = Requests([20, 20], Heads())
    requests.qkv[0][10] = math.nan
    out = requests.attend(compiled(), requests.allocate(compiled(), torch.float16), requests.everything())
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


def test_large_keys_stay_finite_in_float16() -> None:
    requests = Requests([4], Heads())
    requests.qkv[0][:, -Heads().kv * Heads().dim :] = 1e6
    out = requests.attend(compiled(), requests.allocate(compiled(), torch.float16), requests.everything())
    torch.testing.assert_close(out, torch.full_like(out, 65504.0))


def test_page_sizes_it_cannot_do_are_refused() -> None:
    for page_size in (4, 12, 1024):
        with pytest.raises(ConfigError, match=f"--block-size is {page_size}; allowed are 8, 16"):
            Requests([1], Heads(), page_size=page_size).allocate(compiled(), torch.float32)

"""Paged attention by Triton: right by a float64 oracle, and blind to whatever a row does not see."""

import math
import mmap
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.kernels.factories import assert_close
from tests.kernels.triton.attention_factories import ARCH, LAYER, TOLERANCE, Requests, shared_run
from trunkline.kernels.triton import attention as module
from trunkline.kernels.triton import interpreter
from trunkline.kernels.triton.attention import TABLES, WINDOWED, Workspace, attention, decode_capacity, plan_attention

pytestmark = pytest.mark.skipif(not interpreter.is_on(), reason="benchmarks/gpu_visit.sh checks them on a GPU")


@pytest.fixture(autouse=True, scope="module")
def _mended() -> None:
    interpreter.mend()


MAP_NORESERVE = 0x4000  # of Linux; Python 3.11 has no name for it


class Shape(NamedTuple):
    dtype: torch.dtype
    dim: int
    page_size: int
    group: int
    window: int
    soft_cap: float


DTYPES, DIMS, PAGE_SIZES = (torch.float32, torch.float16, torch.bfloat16), (64, 96, 128, 256), (16, 32, 64)
GROUPS, WINDOWS, SOFT_CAPS = (1, 3, 4, 5, 7, 8), (0, 19, 200), (0.0, 2.0)
# Any two values of dtype, head size, page size, window and soft cap meet; groups come twice each.
SHAPES = [
    Shape(
        DTYPES[dtype],
        DIMS[dim],
        PAGE_SIZES[(dim + dtype) % 3],
        GROUPS[(3 * dim + dtype) % 6],
        WINDOWS[(dim + 2 * dtype) % 3],
        SOFT_CAPS[(dim + dtype) % 2],
    )
    for dim in range(4)
    for dtype in range(3)
]


def name(shape: Shape) -> str:
    dtype, dim, page_size, group, window, soft_cap = shape
    return f"{str(dtype)[6:]}-D{dim}-P{page_size}-G{group}-W{window}-{'cap' if soft_cap else 'plain'}"


def compare(shape: Shape, contexts: list[int], chunk: int) -> None:
    """The last row of every request, and the last `chunk` rows of the last one."""
    requests = Requests(
        [[(str(index), context)] for index, context in enumerate(contexts)],
        query=shape.group * (1 if shape.group > 4 else 2),
        kv=1 if shape.group > 4 else 2,
        dim=shape.dim,
        page_size=shape.page_size,
        dtype=shape.dtype,
    )
    chunks = requests.last_rows()
    chunks[-1] = (len(contexts) - 1, contexts[-1] - chunk, contexts[-1])
    out = requests.attend(chunks, window=shape.window, soft_cap=shape.soft_cap)
    oracle = requests.oracle(chunks, window=shape.window, soft_cap=shape.soft_cap)
    assert_close(out, oracle, TOLERANCE[shape.dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_equals_the_oracle(shape: Shape) -> None:
    compare(shape, [1, shape.page_size, 2 * shape.page_size + 1, 77], chunk=11)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_equals_the_oracle_over_several_splits(shape: Shape) -> None:
    compare(shape, [511, 512, 513, 1025, 560], chunk=60)


@pytest.mark.parametrize(
    ("dtype", "dim", "group"), [(torch.float32, 64, 4), (torch.bfloat16, 128, 5), (torch.float16, 256, 3)], ids=str
)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (19, 2.0)])
def test_prompts_equal_the_oracle(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int, group: int, window: int, soft_cap: float
) -> None:
    monkeypatch.setattr(module, "PROMPT_ROWS", 8)
    requests = Requests([[("a", 1)], [("b", 45)], [("c", 70)]], query=group, kv=1, dim=dim, dtype=dtype)
    chunks = [(0, 0, 1), (1, 20, 45), (2, 60, 70)]
    out = requests.attend(chunks, window=window, soft_cap=soft_cap)
    assert_close(out, requests.oracle(chunks, window=window, soft_cap=soft_cap), TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 100, 600])
def test_a_prompt_over_several_splits(window: int) -> None:
    requests = Requests([[("a", 1100)]], query=4, kv=1)
    for chunk in ((0, 0, 600), (0, 470, 1100)):
        assert_close(requests.attend([chunk], window=window), requests.oracle([chunk], window=window), 1e-5)


TREE = [  # three levels, and a run that one request reads for itself
    [("system", 512), ("tools", 512), ("question", 512), ("1", 3)],
    [("system", 512), ("tools", 512), ("question", 512), ("2", 40)],
    [("system", 512), ("tools", 512), ("3", 20)],
    [("system", 512), ("4", 3)],
    [("5", 9)],
]
RUNS = [([0, 1, 2, 3], 0, 512), ([0, 1, 2], 512, 1024), ([0, 1], 1024, 1536)]


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize(("dtype", "query", "kv"), [(torch.float32, 4, 1), (torch.bfloat16, 6, 2)], ids=str)
def test_a_tree_of_three_levels(dtype: torch.dtype, query: int, kv: int, window: int) -> None:
    requests = Requests(TREE, query=query, kv=kv, dtype=dtype)
    chunks = requests.last_rows(3)
    out = requests.attend(chunks, [shared_run(*run) for run in RUNS], window=window)
    assert_close(out, requests.oracle(chunks, window=window), TOLERANCE[dtype])


def test_a_tree_of_two_levels() -> None:
    requests = Requests(TREE[2:], query=2, kv=1)
    out = requests.attend(requests.last_rows(), [shared_run([0, 1], 0, 512)])
    assert_close(out, requests.oracle(requests.last_rows()), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pages_of_fp8(dtype: torch.dtype) -> None:
    requests = Requests([[("a", 5)], [("b", 70)]], dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    chunks, scales = [(0, 4, 5), (1, 60, 70)], (0.5, 3.0)
    out = requests.attend(chunks, scales=scales)
    assert_close(out, requests.oracle(chunks, scales=scales), TOLERANCE[dtype])


@pytest.mark.parametrize("prompt_rows", [1, 10**6], ids=["prompt", "splits"])
@pytest.mark.parametrize(("what", "broken"), [("key", math.nan), ("value", math.nan), ("value", math.inf)])
def test_what_is_not_a_number_shows_where_it_is_seen(
    monkeypatch: pytest.MonkeyPatch, prompt_rows: int, what: str, broken: float
) -> None:
    """Beside rows of the same tile that do not see it."""
    monkeypatch.setattr(module, "PROMPT_ROWS", prompt_rows)
    requests = Requests([[("a", 40)]], query=2, kv=1)
    chunk = [(0, 9, 40)]
    sound = requests.attend(chunk)
    requests.tokens[0][("key", "value").index(what), 20, 0, 7] = broken
    out = requests.attend(chunk)
    assert torch.equal(out[:11], sound[:11])
    assert not out[11:].isfinite().all(dim=1).any(), "it must show"


@pytest.mark.parametrize("prompt_rows", [1, 10**6], ids=["prompt", "splits"])
def test_rows_that_see_nothing_are_zero(monkeypatch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    monkeypatch.setattr(module, "PROMPT_ROWS", prompt_rows)
    requests = Requests([[("a", 3)]], query=2, kv=1)
    chunk = [(0, 0, 3)]
    batch, kv = requests.batch(chunk), requests.pages(chunk)
    work = plan_attention(batch, kv, 2, ARCH)
    qkv, out = torch.randn(3, 4 * 64), torch.full((3, 2 * 64), math.nan)
    before = replace(batch, work=work, positions=torch.full_like(batch.positions, -1))
    attention(qkv, before, kv, LAYER, 0.1, out=out, workspace=Workspace(work.num_parts, 2, 64, "cpu"))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("prompt_rows", [1, 10**6], ids=["prompt", "splits"])
def test_a_later_split_may_weigh_more(monkeypatch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    """Then what came before it fades; elsewhere here the first and longest split mostly has the largest weight."""
    monkeypatch.setattr(module, "PROMPT_ROWS", prompt_rows)
    requests = Requests([[("a", 520)]], query=2, kv=1)
    requests.tokens[0][0, 512:] *= 6
    chunk = [(0, 514, 520)]
    assert_close(requests.attend(chunk), requests.oracle(chunk), 1e-5)


def test_pages_beyond_two_to_the_31() -> None:
    """Pages so far apart that their distance is no int32; memory that nobody touches costs nothing."""
    requests = Requests([[("a", 20)]], query=2, kv=1, dtype=torch.float16)
    chunk = [(0, 19, 20)]
    expected, near, stride, last = requests.attend(chunk), requests.pages(chunk), 2**20, 2**11 + 1
    pools = []
    for pool in (near.keys, near.values):
        memory = mmap.mmap(-1, (last + 1) * stride * 2, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        far = torch.frombuffer(memory, dtype=torch.float16).as_strided(
            (2, last + 1, *pool.shape[2:]), (0, stride, *pool.stride()[2:])
        )
        for page, place in zip(requests.page_table[0], (last, last - 1), strict=True):
            far[LAYER, place] = pool[LAYER, int(page)]
        pools.append(far)
    requests.page_table, requests.num_pages = np.array([[last, last - 1]], np.int32), last + 1
    assert last * stride > 2**31
    kv = replace(near, keys=pools[0], values=pools[1], num_pages=last + 1)
    assert torch.equal(requests.attend(chunk, kv=kv), expected)


def test_a_layer_may_have_a_narrower_window_than_planned() -> None:
    """Layers that see everything and layers with a window take the same plan."""
    requests = Requests([[("a", 1030)], [("b", 520)]], query=2, kv=1)
    chunks = [(0, 1029, 1030), (1, 510, 520)]
    exactly = requests.attend(chunks, window=30)
    for planned in (0, 600):
        assert torch.equal(requests.attend(chunks, window=30, planned_window=planned), exactly)
    assert_close(exactly, requests.oracle(chunks, window=30), 1e-5)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    requests = Requests([[("a", 20)], [("b", 600)]])
    kv, chunks = requests.pages([]), requests.last_rows()
    capacity = decode_capacity(2, 1024, kv, requests.query, ARCH)
    plan_attention(requests.batch(chunks), kv, requests.query, ARCH, capacity)
    with pytest.raises(ValueError, match=r"attention needs 3 rows; there is room for 2"):
        plan_attention(requests.batch([(0, 18, 20), (1, 599, 600)]), kv, requests.query, ARCH, capacity)


def test_what_does_not_belong_together_is_refused() -> None:
    requests, other = Requests([[("a", 20)]]), Requests([[("a", 20)]], dtype=torch.bfloat16)
    kv, chunk = requests.pages([]), [(0, 19, 20)]
    batch = replace(requests.batch(chunk), work=plan_attention(requests.batch(chunk), other.pages([]), 4, ARCH))
    out, workspace = torch.zeros(1, 4 * 64), Workspace(1, 4, 64, "cpu")
    with pytest.raises(AssertionError, match="the work was not planned for fp32"):
        attention(torch.zeros(1, 8 * 64), batch, kv, LAYER, 1.0, out=out, workspace=workspace)
    with pytest.raises(AssertionError, match=r"\[1, 448\]"):
        attention(torch.zeros(1, 7 * 64), batch, kv, LAYER, 1.0, out=out, workspace=workspace)


def test_one_list_of_work_serves_layers_with_a_window_and_without() -> None:
    for arch, tables in WINDOWED.items():
        for key, windowed in tables.items():
            plain = TABLES[arch][key]
            assert windowed.splits.keys() == plain.splits.keys()
            assert windowed.prompt.blocks["BLOCK_M"] == plain.prompt.blocks["BLOCK_M"]

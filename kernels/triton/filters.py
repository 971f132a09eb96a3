"""What top_k and top_p leave of a row: the smallest logit that may be drawn, found without sorting.

`filter_rows` looks for a key (sampling_table.py) between two bounds: it counts, or weighs, what lies at WAYS keys between them and
above, and narrows the bounds to the two around the goal, until they meet. So the result is exact, whatever the logits are. At first it reads
the whole row; once what is left of it fits a short list, it reads that.

    top_k    the largest key that `top_k` tokens reach
    top_p    the largest key that tokens with `top_p` of the weight reach; of what min_p and top_k left, as in vLLM

Of the tokens that have just this key, those with the lowest ids stay. Weights are summed in float64, as on the CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.sampling import check_masks, make_specs
from trunkline.kernels.triton.sampling_table import (
    HIGH,
    INTEGERS,
    IS_PENDING,
    LAST_ID,
    LENGTH,
    LOW,
    NO_KEY,
    REALS,
    STATE,
    STAY,
    TEMPERATURE,
    THRESHOLD,
    TOP,
    TOP_K,
    TOP_P,
    TOP_P_REACH,
    Counts,
    RowTable,
    Workspace,
    is_allowed,
    logits_of,
    mask_of,
    to_key,
    to_logit,
)
from trunkline.kernels.triton.spec import Config, KernelSpec

LIST = 8192  # keys
BOUND = Config({"LIST": LIST, "WAYS": 16, "BLOCK": 512}, num_warps=8)
GATHER = Config({"LIST": LIST, "BLOCK": 4096}, num_warps=8)
SEARCH = Config({"LIST": LIST, "WAYS": 16, "BLOCK": 512}, num_warps=8)
TIES = Config({"BLOCK": 4096}, num_warps=8)


@triton.jit
def _read_row(row_ptr, masks_ptr, mask, mask_stride, start, end, BLOCK: tl.constexpr):
    """Keys of tokens start … start + BLOCK - 1; NO_KEY of those that may not be chosen."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + ids, mask=ids < end, other=0.0)
    return tl.where(is_allowed(masks_ptr, mask, mask_stride, ids, ids < end), to_key(logits), NO_KEY)


@triton.jit
def _read(row_ptr, masks_ptr, mask, mask_stride, list_ptr, is_list, start, end, BLOCK: tl.constexpr):
    """The same, or keys of the list."""
    index = start + tl.arange(0, BLOCK)
    listed = tl.load(list_ptr + index, mask=(index < end) & is_list, other=NO_KEY)
    keys = _read_row(row_ptr, masks_ptr, mask, mask_stride, start, tl.where(is_list, 0, end), BLOCK)
    return tl.where(is_list, listed, keys)


@triton.jit
def _weigh(keys, top, temperature):
    """exp((logit - top) / temperature), float64."""
    return tl.exp((to_logit(keys).to(tl.float64) - top) / temperature)


@triton.jit
def _narrow(low, high, reached, step):
    """The bounds around the goal, which `reached` of the keys low + step, low + 2 * step, … reach."""
    low += tl.sum(reached.to(tl.int64), axis=0) * step
    return low, tl.minimum(high, low + step - 1)


@triton.jit(do_not_specialize=["num_masks", "mask_stride"])
def _bound_kernel(
    logits_ptr, adjusted_ptr, masks_ptr, integers_ptr, reals_ptr, filters_ptr, state_ptr,
    stride, vocab_size, num_masks, mask_stride, LIST: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bounds so close that what reaches the lower one fits the list, if the logits are not too much alike."""
    row = tl.load(filters_ptr + tl.program_id(0))
    state_ptr += row * STATE
    if tl.load(state_ptr + IS_PENDING) == 0:
        return
    top_key = tl.load(state_ptr + TOP)
    low = tl.load(state_ptr + THRESHOLD).to(tl.int64)  # what min_p leaves
    high = top_key.to(tl.int64)
    top_k = tl.load(integers_ptr + row * INTEGERS + TOP_K)
    if top_k > 0:
        row_ptr = logits_of(logits_ptr, adjusted_ptr, integers_ptr, row, stride, vocab_size)
        mask = mask_of(integers_ptr, row, num_masks)
        num_low = vocab_size  # at most so many tokens reach the lower bound
        while (low < high) & (num_low > LIST):
            step, pivots, limits = _pivots(low, high, WAYS)
            tile = tl.zeros([BLOCK, WAYS], tl.int32)
            for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
                keys = _read_row(row_ptr, masks_ptr, mask, mask_stride, start, vocab_size, BLOCK)
                tile += (keys[:, None] >= limits[None]).to(tl.int32)
            numbers = tl.sum(tile, axis=0)
            reached = (numbers >= top_k) & (pivots <= high)
            num_low = tl.minimum(num_low, tl.min(tl.where(reached, numbers, 2**31 - 1), axis=0))
            low += tl.sum(reached.to(tl.int64), axis=0) * step
            high = tl.minimum(high, low + step - 1)
    else:
        floor = to_logit(top_key).to(tl.float64) + tl.load(reals_ptr + row * REALS + TOP_P_REACH)
        low = tl.maximum(low, to_key(floor.to(tl.float32)).to(tl.int64))
    tl.store(state_ptr + LOW, low.to(tl.int32))
    tl.store(state_ptr + HIGH, high.to(tl.int32))


@triton.jit
def _pivots(low, high, WAYS: tl.constexpr):
    """Keys that cut low … high into WAYS parts: their distance; they, int64 [WAYS], some of them above `high`; and as int32."""
    step = (high - low) // WAYS + 1
    pivots = low + (tl.arange(0, WAYS) + 1).to(tl.int64) * step
    return step, pivots, tl.minimum(pivots, high).to(tl.int32)


@triton.jit(do_not_specialize=["num_masks", "mask_stride"])
def _gather_kernel(
    logits_ptr, adjusted_ptr, masks_ptr, integers_ptr, reals_ptr, filters_ptr, state_ptr, lists_ptr, totals_ptr,
    stride, vocab_size, num_masks, mask_stride, LIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List what reaches the lower bound, and weigh what min_p leaves."""
    row = tl.load(filters_ptr + tl.program_id(0))
    state_ptr += row * STATE
    if tl.load(state_ptr + IS_PENDING) == 0:
        return
    top = to_logit(tl.load(state_ptr + TOP)).to(tl.float64)
    low = tl.load(state_ptr + LOW)
    bottom = tl.load(state_ptr + THRESHOLD)
    temperature = tl.load(reals_ptr + row * REALS + TEMPERATURE)
    top_k = tl.load(integers_ptr + row * INTEGERS + TOP_K)
    row_ptr = logits_of(logits_ptr, adjusted_ptr, integers_ptr, row, stride, vocab_size)
    mask = mask_of(integers_ptr, row, num_masks)
    list_ptr = lists_ptr + row.to(tl.int64) * LIST
    weights = tl.zeros([BLOCK], tl.float64)
    length = 0
    for start in range(0, vocab_size, BLOCK):
        keys = _read_row(row_ptr, masks_ptr, mask, mask_stride, start, vocab_size, BLOCK)
        largest = tl.max(keys, axis=0)
        if (largest >= bottom) & (top_k == 0):  # else the top_k are weighed, once they are found
            weights += tl.where(keys >= bottom, _weigh(keys, top, temperature), 0.0)
        if (largest >= low) & (length <= LIST):
            near = (keys >= low).to(tl.int32)
            at = length + tl.cumsum(near, axis=0) - 1
            tl.store(list_ptr + at, keys, mask=(near != 0) & (at < LIST))
            length += tl.sum(near, axis=0)
    tl.store(state_ptr + LENGTH, length)
    tl.store(totals_ptr + row, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize=["num_masks", "mask_stride"])
def _threshold_kernel(
    logits_ptr, adjusted_ptr, masks_ptr, integers_ptr, reals_ptr, filters_ptr, state_ptr, lists_ptr, totals_ptr,
    stride, vocab_size, num_masks, mask_stride, LIST: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Let the bounds meet: first where top_k tokens are reached, then where top_p of their weight is."""
    row = tl.load(filters_ptr + tl.program_id(0))
    state_ptr += row * STATE
    if tl.load(state_ptr + IS_PENDING) == 0:
        return
    top_key = tl.load(state_ptr + TOP)
    top = to_logit(top_key).to(tl.float64)
    temperature = tl.load(reals_ptr + row * REALS + TEMPERATURE)
    top_p = tl.load(reals_ptr + row * REALS + TOP_P)
    top_k = tl.load(integers_ptr + row * INTEGERS + TOP_K)
    row_ptr = logits_of(logits_ptr, adjusted_ptr, integers_ptr, row, stride, vocab_size)
    mask = mask_of(integers_ptr, row, num_masks)
    list_ptr = lists_ptr + row.to(tl.int64) * LIST
    length = tl.load(state_ptr + LENGTH)
    is_list = length <= LIST
    end = tl.where(is_list, length, vocab_size)
    low = tl.load(state_ptr + LOW).to(tl.int64)
    high = tl.load(state_ptr + HIGH).to(tl.int64)
    total = tl.load(totals_ptr + row)
    threshold = low - 1
    stay = vocab_size  # so many of the tokens at the threshold
    equal = vocab_size  # of so many
    for by_weight in range(tl.where(top_k > 0, 0, 1), tl.where(top_p < 1, 2, 1)):
        goal = tl.where(by_weight == 1, top_p * total, top_k.to(tl.float64))
        while low < high:
            step, pivots, limits = _pivots(low, high, WAYS)
            tile = tl.zeros([BLOCK, WAYS], tl.float64)
            for start in range(0, end, BLOCK):
                keys = _read(row_ptr, masks_ptr, mask, mask_stride, list_ptr, is_list, start, end, BLOCK)
                weights = tl.where(by_weight == 1, _weigh(keys, top, temperature), 1.0)
                tile += tl.where(keys[:, None] >= limits[None], weights[:, None], 0.0)
            reached = (tl.sum(tile, axis=0) >= goal) & (pivots <= high)
            low += tl.sum(reached.to(tl.int64), axis=0) * step
            high = tl.minimum(high, low + step - 1)
        above = tl.zeros([BLOCK], tl.int32)
        same = tl.zeros([BLOCK], tl.int32)
        weight = tl.zeros([BLOCK], tl.float64)
        key = low.to(tl.int32)
        for start in range(0, end, BLOCK):
            keys = _read(row_ptr, masks_ptr, mask, mask_stride, list_ptr, is_list, start, end, BLOCK)
            above += (keys > key).to(tl.int32)
            same += (keys == key).to(tl.int32)
            weight += tl.where(keys > key, _weigh(keys, top, temperature), 0.0)
        equal = tl.sum(same, axis=0)
        heavier = tl.sum(weight, axis=0)
        each = _weigh(key, top, temperature)
        most = tl.where(low == threshold, stay, equal).to(tl.float64)
        missing = tl.where(each > 0, tl.ceil((goal - heavier) / tl.where(each > 0, each, 1.0)), most)
        missing = tl.where(by_weight == 1, missing, goal - tl.sum(above, axis=0).to(tl.float64))
        stay = tl.minimum(tl.maximum(missing, 1.0), most).to(tl.int32)
        total = heavier + stay.to(tl.float64) * each
        threshold = low
        high = top_key.to(tl.int64)
    tl.store(state_ptr + THRESHOLD, low.to(tl.int32))
    tl.store(state_ptr + STAY, tl.where(stay < equal, stay, -1))


@triton.jit(do_not_specialize=["num_masks", "mask_stride"])
def _last_id_kernel(
    logits_ptr, adjusted_ptr, masks_ptr, integers_ptr, filters_ptr, state_ptr,
    stride, vocab_size, num_masks, mask_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the tokens at the threshold, find the last that stays, if not all do."""
    row = tl.load(filters_ptr + tl.program_id(0))
    state_ptr += row * STATE
    stay = tl.load(state_ptr + STAY)
    if (tl.load(state_ptr + IS_PENDING) == 0) | (stay < 0):
        return
    threshold = tl.load(state_ptr + THRESHOLD)
    row_ptr = logits_of(logits_ptr, adjusted_ptr, integers_ptr, row, stride, vocab_size)
    mask = mask_of(integers_ptr, row, num_masks)
    seen = 0
    start = 0
    last_id = 0
    while (seen < stay) & (start < vocab_size):
        keys = _read_row(row_ptr, masks_ptr, mask, mask_stride, start, vocab_size, BLOCK)
        ties = (keys == threshold).to(tl.int32)
        is_early = (ties != 0) & (seen + tl.cumsum(ties, axis=0) <= stay)
        last_id = tl.maximum(last_id, tl.max(tl.where(is_early, start + tl.arange(0, BLOCK), 0), axis=0))
        seen += tl.sum(ties, axis=0)
        start += BLOCK
    tl.store(state_ptr + LAST_ID, last_id)


def filter_rows(logits: Tensor, masks: Tensor | None, table: RowTable, counts: Counts, workspace: Workspace) -> None:
    """Find the thresholds of the rows in `table.filters`, between `sampling.choose` and `sampling.draw`; arguments as there."""
    if not counts.filters:
        return
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype} {logits.stride()}"
    assert workspace.lists.shape[1] == LIST, workspace.lists.shape
    rows = (logits, workspace.adjusted, table.integers if masks is None else masks, table.integers)
    num_masks, mask_stride = check_masks(masks, logits.shape[1])
    sizes = (logits.stride(0), logits.shape[1], num_masks, mask_stride)
    grid, filters, state = (counts.filters,), table.filters, workspace.state
    lists = (workspace.lists, workspace.totals)
    _bound_kernel[grid](*rows, table.reals, filters, state, *sizes, **BOUND.blocks, **BOUND.options)
    _gather_kernel[grid](
        *rows, table.reals, filters, state, *lists, *sizes, **GATHER.blocks, **GATHER.options
    )  # fmt: skip
    _threshold_kernel[grid](
        *rows, table.reals, filters, state, *lists, *sizes, **SEARCH.blocks, **SEARCH.options
    )  # fmt: skip
    _last_id_kernel[grid](*rows, filters, state, *sizes, **TIES.blocks, **TIES.options)


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    return [
        *make_specs("filter bound", _bound_kernel, BOUND, {**BOUND.blocks}),
        *make_specs("filter gather", _gather_kernel, GATHER, {**GATHER.blocks}),
        *make_specs("filter threshold", _threshold_kernel, SEARCH, {**SEARCH.blocks}),
        *make_specs("filter last id", _last_id_kernel, TIES, {**TIES.blocks}),
    ]

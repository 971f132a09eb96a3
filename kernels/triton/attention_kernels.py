"""Attention over paged keys and values: the three kernels under attention.py.

    attend_splits   tiles of a few token rows over one split of a context: decoding, verification, shared runs (worklist.py)
    merge_splits    the partial results of a row, merged in the order of its splits
    attend_prompt   tiles of many token rows of one request over all their splits, merged on the way

All arithmetic stands in functions that the kernels share: `_attend_block` takes a block of tokens into a running softmax
(arXiv:1805.02867), `_attend_split` the blocks of a split one after the other, `_fold` a split into what the splits before it
gave. Blocks begin at multiples of BLOCK_N, splits at multiples of SPLIT, both counted from position 0, and a token that a
row does not see adds exact zeros to it. So whatever else a tile holds, a row goes through the same sums in the same order.
(In the interpreter that is bit for bit. On a GPU it is within one kind of tile: tensor cores, and sums over lanes, may round
differently in tiles of another height.)

A tile's rows are its token rows times the GROUP query heads that read one kv head, padded to BLOCK_M. Logarithms are to base
2. What a tile does not own, such as a garbage NaN in a page's unused end, is never loaded; a NaN that some rows of the
tile see and others do not is kept from the others.

Letters: M rows of the tile, N tokens of the block, D head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from trunkline import step

SPLIT = tl.constexpr(step.SPLIT)
ITEM = tl.constexpr(5)  # numbers of an item: worklist.FIELDS
NOTHING = tl.constexpr(float("-inf"))  # logarithm of the weight of no token
FAR = tl.constexpr(2**31 - 1)  # beyond any position


@triton.jit
def _first_seen(position, window, HAS_WINDOW: tl.constexpr):
    """The first token that a row at `position` sees."""
    if HAS_WINDOW:
        return tl.maximum(position - window + 1, 0)
    else:
        return position * 0


@triton.jit
def _is_unsound(x):
    """NaN or infinite: all bits of the exponent are set."""
    if x.dtype == tl.float32:
        return (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    elif x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True) & 0x7F80) == 0x7F80
    else:
        return (x.to(tl.int16, bitcast=True) & 0x7C00) == 0x7C00


@triton.jit
def _attend_block(
    queries, total, weight, peak, start, begin, end, positions, window, keys_ptr, values_ptr, table_ptr, unit, bend,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Tokens start … start + BLOCK_N - 1 into the running softmax: sum of weighted values [M, D], of weights [M], largest
    score [M]. MASKED: not all of them lie in begin … end - 1, or not all rows see all of them.
    """
    token = start + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    is_column = column < HEAD_DIM
    if MASKED:
        is_token = (token >= begin) & (token < end)
        page = tl.load(table_ptr + token // PAGE_SIZE, mask=is_token, other=0)
    else:
        page = tl.load(table_ptr + token // PAGE_SIZE)
    at = page.to(tl.int64) * PAGE_STRIDE + (token % PAGE_SIZE) * HEAD_DIM
    keys_ptrs = keys_ptr + at[None, :] + column[:, None]
    values_ptrs = values_ptr + at[:, None] + column[None, :]
    if MASKED:
        keys = tl.load(keys_ptrs, mask=is_token[None, :] & is_column[:, None], other=0.0)
        values = tl.load(values_ptrs, mask=is_token[:, None] & is_column[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        keys = tl.load(keys_ptrs, mask=is_column[:, None], other=0.0)
        values = tl.load(values_ptrs, mask=is_column[None, :], other=0.0)
    else:
        keys = tl.load(keys_ptrs)
        values = tl.load(values_ptrs)
    if keys.dtype != queries.dtype:  # FP8
        keys = keys.to(tl.float32).to(queries.dtype)
        values = values.to(tl.float32).to(queries.dtype)

    scores = tl.dot(queries, keys, input_precision="ieee")
    if SOFT_CAP:
        scores = 2.0 * tl.sigmoid(scores * bend) - 1.0  # tanh
    if MASKED:
        visible = is_token[None, :] & (token[None, :] <= positions[:, None])
        if HAS_WINDOW:
            visible &= token[None, :] > positions[:, None] - window
        # In the product below, 0 times a NaN were a NaN: such values go, and who sees them gets the NaN by the score.
        is_unsound = _is_unsound(values)
        values = tl.where(is_unsound, 0.0, values)
        has_unsound = tl.max(is_unsound.to(tl.int32), axis=1) > 0
        scores = tl.where(has_unsound[None, :], float("nan"), scores)
        scores = tl.where(visible, scores, NOTHING)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * unit)
    base = tl.where(new_peak == NOTHING, 0.0, new_peak)  # a row that has seen nothing yet
    weights = tl.exp2(tl.fma(scores, unit, -base[:, None]))
    fade = tl.exp2(peak - base)
    weight = tl.fma(weight, fade, tl.sum(weights, axis=1))
    total = tl.dot(weights.to(queries.dtype), values, total * fade[:, None], input_precision="ieee")
    return total, weight, new_peak


@triton.jit
def _attend_split(
    queries, begin, end, positions, lowest, highest, window, keys_ptr, values_ptr, table_ptr, unit, bend,
    HAS_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Attention [M, D] over tokens begin … end - 1 of one split, and the logarithm of its weight [M]; without a visible token
    0 and -inf. `lowest` and `highest` of the rows' positions.

        begin ──masked── low ──every row sees every token── high ──masked── end
    """
    # Of the few blocks that are masked; otherwise registers were seen to spill.
    EDGE_STAGES: tl.constexpr = 1 if BLOCK_M < 64 and queries.dtype != tl.float32 else 2
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], NOTHING, tl.float32)
    first = begin // BLOCK_N * BLOCK_N
    low = first
    if HAS_WINDOW:
        seen_by_all = tl.cdiv(_first_seen(highest, window, HAS_WINDOW), BLOCK_N) * BLOCK_N
        low = tl.minimum(tl.maximum(first, seen_by_all), end)
    high = tl.maximum(low, tl.minimum(end, lowest + 1) // BLOCK_N * BLOCK_N)
    # Phase 0 is first … low - 1, phase 1 the rest, so that masked blocks before and behind the others are one piece of code.
    for phase in range(0 if HAS_WINDOW else 1, 2):
        for start in range(low, low + (high - low) * phase, BLOCK_N):
            total, weight, peak = _attend_block(
                queries, total, weight, peak, start, begin, end, positions, window,
                keys_ptr, values_ptr, table_ptr, unit, bend,
                False, HAS_WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, PAGE_STRIDE,
            )  # fmt: skip
        edge = first + (high - first) * phase
        for start in tl.range(edge, low + (end - low) * phase, BLOCK_N, num_stages=EDGE_STAGES):
            total, weight, peak = _attend_block(
                queries, total, weight, peak, start, begin, end, positions, window,
                keys_ptr, values_ptr, table_ptr, unit, bend,
                True, HAS_WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, PAGE_STRIDE,
            )  # fmt: skip
    some = tl.where(weight == 0.0, 1.0, weight)  # of a NaN stays a NaN
    return total / some[:, None], tl.where(weight == 0.0, NOTHING, peak + tl.log2(some))


@triton.jit
def _fold(total, weight, peak, part, logarithm):
    """A split's `part` [M, D] of `logarithm` [M] into the sum of those before it: total [M, D], weight [M], peak [M]."""
    new_peak = tl.maximum(peak, logarithm)
    base = tl.where(new_peak == NOTHING, 0.0, new_peak)
    fade = tl.exp2(peak - base)
    gain = tl.exp2(logarithm - base)
    total = tl.fma(part, gain[:, None], total * fade[:, None])
    return total, tl.fma(weight, fade, gain), new_peak


@triton.jit
def _finish(total, weight, value_scale):
    return total / tl.where(weight == 0.0, 1.0, weight)[:, None] * value_scale


@triton.jit
def _rows(item_ptr, item_rows_ptr, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of a tile, all [M]: is it one, its token row and query head.

    Called once before the tokens are gone through, and once behind: kept meanwhile, they would take the registers of what is
    summed. Hence volatile, or the compiler would see that it is the same.
    """
    first = tl.load(item_ptr, volatile=True)
    count = tl.load(item_ptr + 1, volatile=True)
    place = tl.arange(0, BLOCK_M)
    is_row = place // GROUP < count
    row = tl.load(item_rows_ptr + first + place // GROUP, mask=is_row, other=0)
    return is_row, row, kv_head * GROUP + place % GROUP


@triton.jit
def _load_queries(
    item_ptr, item_rows_ptr, positions_ptr, qkv_ptr, kv_head,
    GROUP: tl.constexpr, ROW_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of the rows of a tile: position [M], -1 where there is none, and query [M, D]."""
    is_row, row, head = _rows(item_ptr, item_rows_ptr, kv_head, GROUP, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    queries_ptrs = qkv_ptr + row.to(tl.int64)[:, None] * ROW_STRIDE + head[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(queries_ptrs, mask=is_row[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    return tl.load(positions_ptr + row, mask=is_row, other=-1), queries


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend_splits_kernel(
    qkv_ptr, keys_ptr, values_ptr, parts_ptr, logarithms_ptr,
    items_ptr, num_items_ptr, item_rows_ptr, first_part_ptr, positions_ptr, page_table_ptr,
    table_stride, window, unit, bend,
    HAS_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Items of worklist.WorkList.splits: how many is read from the device, so a captured graph serves every context."""
    num_pairs = tl.load(num_items_ptr) * KV_HEADS
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        kv_head = pair % KV_HEADS
        item_ptr = items_ptr + pair // KV_HEADS * ITEM
        position, queries = _load_queries(
            item_ptr, item_rows_ptr, positions_ptr, qkv_ptr, kv_head,
            GROUP, (GROUP + 2) * KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
        table_ptr = page_table_ptr + tl.load(item_ptr + 2).to(tl.int64) * table_stride
        begin = tl.load(item_ptr + 3)
        end = tl.load(item_ptr + 4)
        split = begin // SPLIT
        lowest = tl.min(tl.where(position < 0, FAR, position), axis=0)
        highest = tl.max(position, axis=0)
        if HAS_WINDOW:
            begin = tl.maximum(begin, _first_seen(lowest, window, HAS_WINDOW))
        if begin < end:
            head_offset = kv_head * (PAGE_SIZE * HEAD_DIM)
            part, logarithm = _attend_split(
                queries, begin, end, position, lowest, highest, window,
                keys_ptr + head_offset, values_ptr + head_offset, table_ptr, unit, bend,
                HAS_WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE_SIZE, PAGE_STRIDE,
            )  # fmt: skip
            is_row, row, head = _rows(item_ptr, item_rows_ptr, kv_head, GROUP, BLOCK_M)
            first_split = _first_seen(position, window, HAS_WINDOW) // SPLIT
            is_part = is_row & (first_split <= split) & (split <= position // SPLIT)  # only those have a place
            slot = tl.load(first_part_ptr + row, mask=is_part, other=0).to(tl.int64) + split
            at = slot * (GROUP * KV_HEADS) + head
            column = tl.arange(0, BLOCK_D)
            mask = is_part[:, None] & (column < HEAD_DIM)[None, :]
            tl.store(logarithms_ptr + at, logarithm, mask=is_part)
            tl.store(parts_ptr + at[:, None] * HEAD_DIM + column[None, :], part, mask=mask)


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend_prompt_kernel(
    qkv_ptr, keys_ptr, values_ptr, out_ptr, items_ptr, num_items_ptr, item_rows_ptr, positions_ptr, page_table_ptr,
    table_stride, window, unit, bend, value_scale,
    HAS_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Items of worklist.WorkList.prompts. The order of heads within items lets neighbours read the same pages."""
    num_pairs = tl.load(num_items_ptr) * KV_HEADS
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        kv_head = pair % KV_HEADS
        item_ptr = items_ptr + pair // KV_HEADS * ITEM
        position, queries = _load_queries(
            item_ptr, item_rows_ptr, positions_ptr, qkv_ptr, kv_head,
            GROUP, (GROUP + 2) * KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
        table_ptr = page_table_ptr + tl.load(item_ptr + 2).to(tl.int64) * table_stride
        begin = tl.load(item_ptr + 3)
        end = tl.load(item_ptr + 4)
        lowest = tl.min(tl.where(position < 0, FAR, position), axis=0)
        highest = tl.max(position, axis=0)
        if HAS_WINDOW:
            begin = tl.maximum(begin, _first_seen(lowest, window, HAS_WINDOW))
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], NOTHING, tl.float32)
        head_offset = kv_head * (PAGE_SIZE * HEAD_DIM)
        for split in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
            part, logarithm = _attend_split(
                queries, tl.maximum(begin, split * SPLIT), tl.minimum(end, split * SPLIT + SPLIT), position, lowest,
                highest, window, keys_ptr + head_offset, values_ptr + head_offset, table_ptr, unit, bend,
                HAS_WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE_SIZE, PAGE_STRIDE,
            )  # fmt: skip
            total, weight, peak = _fold(total, weight, peak, part, logarithm)
        is_row, row, head = _rows(item_ptr, item_rows_ptr, kv_head, GROUP, BLOCK_M)
        column = tl.arange(0, BLOCK_D)
        at = row.to(tl.int64) * (GROUP * KV_HEADS) + head
        out = _finish(total, weight, value_scale).to(out_ptr.dtype.element_ty)
        mask = is_row[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(out_ptr + at[:, None] * HEAD_DIM + column[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["window"])
def merge_splits_kernel(
    parts_ptr, logarithms_ptr, out_ptr, merge_rows_ptr, num_rows_ptr, first_part_ptr, positions_ptr,
    window, value_scale,
    HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_H query heads of a row, whose splits it walks through in order."""
    num_blocks = (HEADS + BLOCK_H - 1) // BLOCK_H
    num_pairs = tl.load(num_rows_ptr) * num_blocks
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        row = tl.load(merge_rows_ptr + pair // num_blocks)
        head = pair % num_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        position = tl.load(positions_ptr + row)
        first_part = tl.load(first_part_ptr + row)
        first_split = _first_seen(position, window, HAS_WINDOW) // SPLIT
        last_split = position // SPLIT
        column = tl.arange(0, BLOCK_D)
        mask = (head < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
        total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        weight = tl.zeros([BLOCK_H], tl.float32)
        peak = tl.full([BLOCK_H], NOTHING, tl.float32)
        for split in range(first_split, last_split + 1):
            at = (first_part + split).to(tl.int64) * HEADS + head
            logarithm = tl.load(logarithms_ptr + at, mask=head < HEADS, other=NOTHING)
            part = tl.load(parts_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
            total, weight, peak = _fold(total, weight, peak, part, logarithm)
        at = row.to(tl.int64) * HEADS + head
        out = _finish(total, weight, value_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * HEAD_DIM + column[None, :], out, mask=mask)

"""From logits to tokens on the GPU, nothing of it waiting for the host; what is right is defined by workers/sampler.py.

    adjust      penalties, bias and bans, for the rows that have any: a copy of their logits
    choose      the likeliest token of every row, as far as its mask allows; failures
    (filters)   how small a logit may be that top_k and top_p leave, see filters.py
    draw        the largest of logits + temperature * noise

A row is cut into blocks of the same size wherever it runs, and their results are merged in order: a row's bits do not depend on its
neighbours. Greedy rows without a mask are read once, and that is all.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.noise import GUMBEL_SPAN, gumbel
from trunkline.kernels.triton.sampling_table import (
    ADJUSTED,
    ADJUSTS,
    BLOCK,
    CHANGES,
    CHANGES_END,
    DRAW,
    FREQUENCY,
    GREEDY,
    INFINITY_KEY,
    INTEGERS,
    IS_PENDING,
    IS_REFUSED,
    KIND,
    LANES,
    LAST_ID,
    MIN_P_REACH,
    NO_RANKED_KEY,
    OUTPUT,
    OUTPUT_END,
    POSITION,
    PRESENCE,
    PROMPT,
    REALS,
    REPETITION,
    ROW,
    STATE,
    TEMPERATURE,
    THRESHOLD,
    TOP,
    Counts,
    RowTable,
    Status,
    Workspace,
    id_of,
    is_allowed,
    key_of,
    logits_of,
    mask_of,
    to_key,
    to_logit,
    to_ranked,
)
from trunkline.kernels.triton.spec import Config, KernelSpec

SCAN = Config({"BLOCK": BLOCK}, num_warps=8)
MERGE = Config({"LANES": LANES}, num_warps=4)
HISTORY = Config({"BLOCK": 1024}, num_warps=4)

_SEEN = tl.constexpr(1 << 30)  # set where a token stands in the prompt; below are its occurrences in the output
_NOT_FINITE = tl.constexpr(int(Status.NOT_FINITE))
_NOTHING_ALLOWED = tl.constexpr(int(Status.NOTHING_ALLOWED))
_REFUSED = tl.constexpr(int(Status.REFUSED))
_ALL_BANNED = tl.constexpr(int(Status.ALL_BANNED))
_TOO_STRONG = tl.constexpr(int(Status.TOO_STRONG))
_IMPOSSIBLE = tl.constexpr(int(Status.IMPOSSIBLE))


# Adjustments.


@triton.jit(do_not_specialize=["vocab_size"])
def _count_kernel(words_ptr, adjusts_ptr, previous_ptr, counts_ptr, vocab_size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    fields_ptr = adjusts_ptr + place * ADJUSTS
    row_ptr = counts_ptr + place * vocab_size
    output = tl.load(fields_ptr + OUTPUT)
    end = tl.load(fields_ptr + OUTPUT_END)
    for start in range(tl.load(fields_ptr + PROMPT), end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ids = tl.load(words_ptr + index, mask=index < end, other=0)
        chosen = tl.load(previous_ptr + (-1 - ids), mask=ids < 0, other=0)
        ids = tl.where(ids < 0, tl.maximum(chosen, 0), ids)  # of a row that failed: whoever builds on it fails anyway
        tl.atomic_or(row_ptr + ids, _SEEN, mask=index < tl.minimum(output, end), sem="relaxed")
        tl.atomic_add(row_ptr + ids, 1, mask=(index >= output) & (index < end), sem="relaxed")


@triton.jit
def _penalize_kernel(
    logits_ptr, adjusted_ptr, adjusts_ptr, reals_ptr, stride, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """Each number of `adjusted` is a token's count before, and its logit afterwards."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(adjusts_ptr + place * ADJUSTS + ROW)
    presence = tl.load(reals_ptr + row * REALS + PRESENCE)
    frequency = tl.load(reals_ptr + row * REALS + FREQUENCY)
    repetition = tl.load(reals_ptr + row * REALS + REPETITION).to(tl.float32)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    at_ptr = adjusted_ptr + place * vocab_size + ids
    count = tl.load(at_ptr, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=inside, other=0.0)
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(count != 0, repeated, logits)
    count = count & (_SEEN - 1)
    lowered = (logits.to(tl.float64) - (presence + frequency * count.to(tl.float64))).to(tl.float32)
    tl.store(at_ptr, tl.where(count > 0, lowered, logits), mask=inside)


@triton.jit(do_not_specialize=["vocab_size"])
def _change_kernel(words_ptr, adjusts_ptr, adjusted_ptr, vocab_size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    fields_ptr = adjusts_ptr + place * ADJUSTS
    end = tl.load(fields_ptr + CHANGES_END)
    for start in range(tl.load(fields_ptr + CHANGES), end, 2 * BLOCK):
        index = start + 2 * tl.arange(0, BLOCK)
        ids = tl.load(words_ptr + index, mask=index < end, other=0)
        change = tl.load(words_ptr + index + 1, mask=index < end, other=0).to(tl.float32, bitcast=True)
        at_ptr = adjusted_ptr + place * vocab_size + ids
        logits = tl.load(at_ptr, mask=index < end, other=0.0)
        tl.store(at_ptr, tl.where(change == float("-inf"), change, logits + change), mask=index < end)


def adjust(
    logits: Tensor, previous: Tensor | None, table: RowTable, counts: Counts, workspace: Workspace
) -> None:  # fmt: skip
    """Fill `workspace.adjusted` for the rows in `table.adjusts`. Penalties are rounded as the CPU rounds them.

    logits    float32 [L, V], rows may be further apart
    previous  int32 [any]: the tokens that the step before chose; None: no word is negative
    """
    vocab_size = _check(logits, counts, workspace)
    if not counts.adjusts:
        return
    adjusted = workspace.adjusted[: counts.adjusts]
    adjusted.zero_()
    _count_kernel[(counts.adjusts,)](
        table.words, table.adjusts, table.words if previous is None else previous, adjusted.view(torch.int32), vocab_size,
        **HISTORY.blocks, **HISTORY.options,
    )  # fmt: skip
    _penalize_kernel[(counts.adjusts, num_blocks(vocab_size))](
        logits, adjusted, table.adjusts, table.reals, logits.stride(0), vocab_size, **SCAN.blocks, **SCAN.options
    )  # fmt: skip
    _change_kernel[(counts.adjusts,)](
        table.words, table.adjusts, adjusted, vocab_size, **HISTORY.blocks, **HISTORY.options
    )  # fmt: skip


# The likeliest token.


@triton.jit(do_not_specialize=["num_masks", "mask_stride"])
def _scan_kernel(
    logits_ptr, adjusted_ptr, masks_ptr, integers_ptr, ranked_ptr, allowed_ptr, stride, vocab_size, num_masks, mask_stride,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf"))
    ranked = tl.where(inside, to_ranked(to_key(logits), ids), NO_RANKED_KEY)
    best = tl.max(ranked, axis=0)
    out_ptr = ranked_ptr + row.to(tl.int64) * 3 * LANES + block
    tl.store(out_ptr, best)
    place = tl.load(integers_ptr + row * INTEGERS + ADJUSTED).to(tl.int64)
    if place >= 0:
        logits = tl.load(adjusted_ptr + place * vocab_size + ids, mask=inside, other=float("-inf"))
        ranked = tl.where(inside, to_ranked(to_key(logits), ids), NO_RANKED_KEY)
        best = tl.max(ranked, axis=0)
    tl.store(out_ptr + LANES, best)
    mask = mask_of(integers_ptr, row, num_masks)
    if mask >= 0:
        allowed = is_allowed(masks_ptr, mask, mask_stride, ids, inside)
        best = tl.max(tl.where(allowed, ranked, NO_RANKED_KEY), axis=0)
        tl.store(allowed_ptr + row * LANES + block, tl.sum(allowed.to(tl.int32), axis=0))
    tl.store(out_ptr + 2 * LANES, best)


@triton.jit(do_not_specialize=["num_blocks", "num_masks", "vocab_size"])
def _conclude_kernel(
    integers_ptr, reals_ptr, ranked_ptr, allowed_ptr, state_ptr, token_ids_ptr, status_ptr, tops_ptr,
    num_blocks, num_masks, vocab_size, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.arange(0, LANES)
    inside = block < num_blocks
    row_ptr = ranked_ptr + row.to(tl.int64) * 3 * LANES + block
    raw = key_of(tl.max(tl.load(row_ptr, mask=inside, other=NO_RANKED_KEY), axis=0))
    adjusted = key_of(tl.max(tl.load(row_ptr + LANES, mask=inside, other=NO_RANKED_KEY), axis=0))
    best = tl.max(tl.load(row_ptr + 2 * LANES, mask=inside, other=NO_RANKED_KEY), axis=0)
    is_masked = mask_of(integers_ptr, row, num_masks) >= 0
    num_allowed = tl.sum(tl.load(allowed_ptr + row * LANES + block, mask=inside & is_masked, other=0), axis=0)
    kind = tl.load(integers_ptr + row * INTEGERS + KIND)
    refused = tl.load(integers_ptr + row * INTEGERS + IS_REFUSED)

    # From the last reason to the first.
    lowest = to_key(float("-inf") + tl.zeros([], tl.float32))
    is_decided = is_masked & (num_allowed == 1) & (kind != 0)
    status = tl.where(is_masked & (key_of(best) <= lowest), _IMPOSSIBLE, 0)
    status = tl.where(adjusted >= INFINITY_KEY, _TOO_STRONG, status)
    status = tl.where(adjusted <= lowest, _ALL_BANNED, status)
    status = tl.where(refused != 0, _REFUSED, status)
    status = tl.where(is_decided, 0, status)
    status = tl.where(is_masked & (num_allowed == 0), _NOTHING_ALLOWED, status)
    status = tl.where(kind == 0, tl.where(refused != 0, _REFUSED, 0), status)
    is_sound = (raw < INFINITY_KEY) & (raw > lowest)
    status = tl.where(is_sound, status, _NOT_FINITE)

    chosen = (status == 0) & ((kind == GREEDY) | is_decided)
    tl.store(token_ids_ptr + row, tl.where(chosen, id_of(best), -1))
    tl.store(status_ptr + row, status)
    tl.store(tops_ptr + row, to_logit(tl.where(is_sound, adjusted, raw)))
    top = to_logit(key_of(best))
    floor = (top.to(tl.float64) + tl.load(reals_ptr + row * REALS + MIN_P_REACH)).to(tl.float32)
    state_ptr += row * STATE
    tl.store(state_ptr + IS_PENDING, ((status == 0) & (kind == DRAW) & (is_decided == 0)).to(tl.int32))
    tl.store(state_ptr + TOP, key_of(best))
    tl.store(state_ptr + THRESHOLD, to_key(floor))
    tl.store(state_ptr + LAST_ID, vocab_size)


def choose(
    logits: Tensor, masks: Tensor | None, table: RowTable, counts: Counts, workspace: Workspace,
    *, token_ids: Tensor, status: Tensor, tops: Tensor,
) -> None:  # fmt: skip
    """Choose what needs no draw, see what fails, and let the others wait for their draw; after `adjust`.

    logits     float32 [L, V], rows may be further apart
    masks      int32 [M, at least V/32] or None: no row is masked
    token_ids  int32 [L]: of the likeliest token; -1 where a row fails, is only looked at, or draws
    status     int32 [L]: see Status
    tops       float32 [L]: the largest logit, of a row that is not sound before adjustments, else after them
    """
    vocab_size = _check(logits, counts, workspace)
    assert all(len(out) == counts.rows for out in (token_ids, status, tops)), (len(token_ids), len(status), len(tops))
    num_masks, mask_stride = check_masks(masks, vocab_size)
    if not counts.rows:
        return
    blocks = num_blocks(vocab_size)
    _scan_kernel[(counts.rows, blocks)](
        logits, workspace.adjusted, table.integers if masks is None else masks, table.integers, workspace.ranked,
        workspace.allowed, logits.stride(0), vocab_size, num_masks, mask_stride,
        **MERGE.blocks, **SCAN.blocks, **SCAN.options,
    )  # fmt: skip
    _conclude_kernel[(counts.rows,)](
        table.integers, table.reals, workspace.ranked, workspace.allowed, workspace.state, token_ids, status, tops,
        blocks, num_masks, vocab_size, **MERGE.blocks, **MERGE.options,
    )  # fmt: skip


# The draw.


@triton.jit(do_not_specialize=["num_masks", "mask_stride"])
def _score_kernel(
    logits_ptr, adjusted_ptr, masks_ptr, integers_ptr, reals_ptr, seeds_ptr, draws_ptr, state_ptr, scores_ptr, winners_ptr,
    stride, vocab_size, num_masks, mask_stride, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(draws_ptr + tl.program_id(0))
    block = tl.program_id(1)
    state_ptr += row * STATE
    if tl.load(state_ptr + IS_PENDING) == 0:
        return
    top = to_logit(tl.load(state_ptr + TOP)).to(tl.float64)
    threshold = tl.load(state_ptr + THRESHOLD)
    temperature = tl.load(reals_ptr + row * REALS + TEMPERATURE)
    first_id = block * BLOCK
    ids = first_id + tl.arange(0, BLOCK)
    row_ptr = logits_of(logits_ptr, adjusted_ptr, integers_ptr, row, stride, vocab_size)
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    allowed = is_allowed(masks_ptr, mask_of(integers_ptr, row, num_masks), mask_stride, ids, ids < vocab_size)
    keys = to_key(logits)
    kept = allowed & ((keys > threshold) | ((keys == threshold) & (ids <= tl.load(state_ptr + LAST_ID))))
    kept = kept & (logits.to(tl.float64) >= top - temperature * GUMBEL_SPAN)  # others can't win: a saving
    score = top * 0 + float("-inf")
    winner = first_id
    if tl.max(kept.to(tl.int32), axis=0) > 0:
        noise = gumbel(
            tl.load(seeds_ptr + row), tl.load(integers_ptr + row * INTEGERS + POSITION), first_id, BLOCK
        )  # fmt: skip
        scores = tl.where(kept, logits.to(tl.float64) + temperature * noise, float("-inf"))
        score, lane = tl.max(scores, axis=0, return_indices=True)
        winner = first_id + lane
    at = row.to(tl.int64) * LANES + block
    tl.store(scores_ptr + at, score)
    tl.store(winners_ptr + at, winner)


@triton.jit(do_not_specialize=["num_blocks"])
def _decide_kernel(
    draws_ptr, state_ptr, scores_ptr, winners_ptr, token_ids_ptr, num_blocks, LANES: tl.constexpr
):  # fmt: skip
    row = tl.load(draws_ptr + tl.program_id(0))
    if tl.load(state_ptr + row * STATE + IS_PENDING) == 0:
        return
    block = tl.arange(0, LANES)
    at = row.to(tl.int64) * LANES
    scores = tl.load(scores_ptr + at + block, mask=block < num_blocks, other=float("-inf"))
    best = tl.argmax(scores, axis=0)  # of equals the first: the lowest id
    tl.store(token_ids_ptr + row, tl.load(winners_ptr + at + best))


def draw(
    logits: Tensor, masks: Tensor | None, table: RowTable, counts: Counts, workspace: Workspace, *, token_ids: Tensor
) -> None:
    """Draw the tokens of the rows that `choose` left waiting, after `filters.filter_rows`; arguments as there."""
    vocab_size = _check(logits, counts, workspace)
    num_masks, mask_stride = check_masks(masks, vocab_size)
    if not counts.draws:
        return
    blocks = num_blocks(vocab_size)
    _score_kernel[(counts.draws, blocks)](
        logits, workspace.adjusted, table.integers if masks is None else masks, table.integers, table.reals, table.seeds,
        table.draws, workspace.state, workspace.scores, workspace.winners, logits.stride(0), vocab_size, num_masks,
        mask_stride, **MERGE.blocks, **SCAN.blocks, **SCAN.options,
    )  # fmt: skip
    _decide_kernel[(counts.draws,)](
        table.draws, workspace.state, workspace.scores, workspace.winners, token_ids, blocks,
        **MERGE.blocks, **MERGE.options,
    )  # fmt: skip


def num_blocks(vocab_size: int) -> int:
    """Into how many blocks a row is cut."""
    return triton.cdiv(vocab_size, BLOCK)


def _check(logits: Tensor, counts: Counts, workspace: Workspace) -> int:
    """The size of the vocabulary."""
    rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype} {logits.stride()}"
    assert rows == counts.rows <= len(workspace.state), f"{rows} rows of {counts.rows}, at most {len(workspace.state)}"
    assert num_blocks(vocab_size) <= LANES, f"a vocabulary of {vocab_size}"
    assert counts.adjusts <= len(workspace.adjusted), f"{counts.adjusts} rows adjust, {len(workspace.adjusted)} fit"
    return vocab_size


def check_masks(masks: Tensor | None, vocab_size: int) -> tuple[int, int]:
    """Number of masks, and how far apart they are."""
    if masks is None:
        return 0, 0
    assert masks.dtype == torch.int32 and masks.stride(1) == 1, f"{masks.dtype} {masks.stride()}"
    assert masks.shape[1] * 32 >= vocab_size, f"{masks.shape} for {vocab_size} tokens"
    return masks.shape[0], masks.stride(0)


TYPES = {  # of the arguments of all kernels of sampling
    "logits_ptr": "*fp32",
    "adjusted_ptr": "*fp32",
    "masks_ptr": "*i32",
    "reals_ptr": "*fp64",
    "seeds_ptr": "*i64",
    "ranked_ptr": "*i64",
    "tops_ptr": "*fp32",
    "peaks_ptr": "*fp32",
    "likeliest_ptr": "*i64",
    "scores_ptr": "*fp64",
    "totals_ptr": "*fp64",
    "vocab_size": "i32",
    "num_masks": "i32",
    "mask_stride": "i32",
    "num_blocks": "i32",
}


def make_specs(name: str, kernel: triton.JITFunction, config: Config, constants: dict[str, int]) -> list[KernelSpec]:
    """A kernel's specs; if it reads logits, for a vocabulary that 16 divides, whose rows begin at multiples of it, and for others."""
    names = [name for name in kernel.arg_names if name not in constants]
    strides = ("i32:16", "i32") if "stride" in names else ("i32",)
    sizes = ("stride", "vocab_size") if "stride" in names else ()
    return [
        KernelSpec(
            name=name + " odd" * (strides[0] != stride),
            kernel=kernel,
            types={name: stride if name in sizes else TYPES.get(name, "*i32") for name in names},
            constants=constants,
            config=config,
            quick=strides[0] == stride,
        )
        for stride in strides
    ]


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    blocks = {**SCAN.blocks, **MERGE.blocks}
    return [
        *make_specs("sampling count", _count_kernel, HISTORY, {**HISTORY.blocks}),
        *make_specs("sampling penalize", _penalize_kernel, SCAN, {**SCAN.blocks}),
        *make_specs("sampling change", _change_kernel, HISTORY, {**HISTORY.blocks}),
        *make_specs("sampling scan", _scan_kernel, SCAN, blocks),
        *make_specs("sampling conclude", _conclude_kernel, MERGE, {**MERGE.blocks}),
        *make_specs("sampling score", _score_kernel, SCAN, blocks),
        *make_specs("sampling decide", _decide_kernel, MERGE, {**MERGE.blocks}),
    ]

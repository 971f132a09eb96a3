"""Log-probabilities of a step's tokens, their ranks, and the likeliest tokens beside them: of the model's own distribution.

Sums of exp are taken of blocks of a row in float32, and merged in float64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.sampling import SCAN, make_specs, num_blocks
from trunkline.kernels.triton.sampling_table import (
    ALTERNATIVES,
    LANES,
    NO_RANKED_KEY,
    REPORTS,
    ROW,
    TARGET,
    Counts,
    RowTable,
    Workspace,
    id_of,
    key_of,
    to_key,
    to_logit,
    to_ranked,
)
from trunkline.kernels.triton.spec import Config, KernelSpec

MAX_ALTERNATIVES = 20
REPORT = 48  # words: the rank, 1 + 20 token ids, and as many log-probabilities from FIRST_LOGPROB on
FIRST_LOGPROB = 24
MERGE_LIKELIEST = Config({"LANES": LANES, "MOST": MAX_ALTERNATIVES, "COLUMNS": 32, "REPORT": REPORT}, num_warps=8)

_FIRST_LOGPROB = tl.constexpr(FIRST_LOGPROB)


@triton.jit
def _target(reports_ptr, token_ids_ptr, report, row):
    target = tl.load(reports_ptr + report * REPORTS + TARGET)
    return tl.where(target >= 0, target, tl.load(token_ids_ptr + row))


@triton.jit(do_not_specialize=["num_blocks"])
def _report_blocks_kernel(
    logits_ptr, reports_ptr, status_ptr, token_ids_ptr, peaks_ptr, ranks_ptr, likeliest_ptr, stride, vocab_size, num_blocks,
    LANES: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    report = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(reports_ptr + report * REPORTS + ROW)
    if tl.load(status_ptr + row) != 0:
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    logits = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    peak = tl.max(logits, axis=0)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks_ptr + (report * LANES + block) * 2, peak)
    tl.store(peaks_ptr + (report * LANES + block) * 2 + 1, tl.sum(tl.exp(logits - finite), axis=0))
    target = _target(reports_ptr, token_ids_ptr, report, row)
    ranked = tl.where(inside, to_ranked(to_key(logits), ids), NO_RANKED_KEY)
    own = to_ranked(to_key(tl.load(row_ptr + target)), target)
    tl.store(ranks_ptr + report * LANES + block, tl.sum((ranked > own).to(tl.int32), axis=0))
    out_ptr = likeliest_ptr + (report * num_blocks + block) * MOST
    for index in range(tl.load(reports_ptr + report * REPORTS + ALTERNATIVES)):
        best = tl.max(ranked, axis=0)
        tl.store(out_ptr + index, best)
        ranked = tl.where(ranked == best, NO_RANKED_KEY, ranked)


@triton.jit(do_not_specialize=["num_blocks"])
def _report_kernel(
    logits_ptr, reports_ptr, status_ptr, token_ids_ptr, peaks_ptr, ranks_ptr, likeliest_ptr, out_ptr, stride, num_blocks,
    LANES: tl.constexpr, MOST: tl.constexpr, COLUMNS: tl.constexpr, REPORT: tl.constexpr,
):  # fmt: skip
    report = tl.program_id(0).to(tl.int64)
    row = tl.load(reports_ptr + report * REPORTS + ROW)
    if tl.load(status_ptr + row) != 0:
        return
    block = tl.arange(0, LANES)
    inside = block < num_blocks
    at = report * LANES + block
    peaks = tl.load(peaks_ptr + at * 2, mask=inside, other=float("-inf")).to(tl.float64)
    sums = tl.load(peaks_ptr + at * 2 + 1, mask=inside, other=0.0).to(tl.float64)
    peak = tl.max(peaks, axis=0)
    log_total = peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), axis=0))
    rank = 1 + tl.sum(tl.load(ranks_ptr + at, mask=inside, other=0), axis=0)
    target = _target(reports_ptr, token_ids_ptr, report, row)
    own = tl.load(logits_ptr + row.to(tl.int64) * stride + target).to(tl.float64)
    out_ptr += report * REPORT
    tl.store(out_ptr, rank)
    tl.store(out_ptr + 1, target)
    tl.store(out_ptr + _FIRST_LOGPROB, (own - log_total).to(tl.float32).to(tl.int32, bitcast=True))
    number = tl.load(reports_ptr + report * REPORTS + ALTERNATIVES)
    column = tl.arange(0, COLUMNS)[None]
    ranked = tl.load(
        likeliest_ptr + (report * num_blocks + block[:, None]) * MOST + column,
        mask=inside[:, None] & (column < number), other=NO_RANKED_KEY,
    )  # fmt: skip
    for index in range(number):
        best = tl.max(tl.max(ranked, axis=1), axis=0)
        logprob = (to_logit(key_of(best)).to(tl.float64) - log_total).to(tl.float32)
        tl.store(out_ptr + 2 + index, id_of(best))
        tl.store(out_ptr + _FIRST_LOGPROB + 1 + index, logprob.to(tl.int32, bitcast=True))
        ranked = tl.where(ranked == best, NO_RANKED_KEY, ranked)


def report(
    logits: Tensor, table: RowTable, counts: Counts, workspace: Workspace,
    *, token_ids: Tensor, status: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Write what `table.reports` asks for; after all tokens are chosen.

    logits     float32 [L, V], the model's own, rows may be further apart
    token_ids  int32 [L]; status int32 [L]: of rows that failed nothing is written
    out        int32 [R, REPORT]: rank; the scored token id, then the likeliest; from FIRST_LOGPROB on the bits of their
               log-probabilities, float32, -inf where a logit is
    """
    if not counts.reports:
        return
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype} {logits.stride()}"
    assert out.shape == (counts.reports, REPORT) and out.dtype == torch.int32, f"{out.shape} {out.dtype}"
    blocks = num_blocks(logits.shape[1])
    assert workspace.likeliest.shape[1:] == (blocks, MAX_ALTERNATIVES), workspace.likeliest.shape
    tensors = (table.reports, status, token_ids, workspace.peaks, workspace.ranks, workspace.likeliest)
    _report_blocks_kernel[(counts.reports, blocks)](
        logits, *tensors, logits.stride(0), logits.shape[1], blocks,
        LANES=LANES, MOST=MAX_ALTERNATIVES, **SCAN.blocks, **SCAN.options,
    )  # fmt: skip
    _report_kernel[(counts.reports,)](
        logits, *tensors, out, logits.stride(0), blocks, **MERGE_LIKELIEST.blocks, **MERGE_LIKELIEST.options
    )  # fmt: skip


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    blocks = {"LANES": LANES, "MOST": MAX_ALTERNATIVES, **SCAN.blocks}
    return [
        *make_specs("logprobs of blocks", _report_blocks_kernel, SCAN, blocks),
        *make_specs("logprobs", _report_kernel, MERGE_LIKELIEST, {**MERGE_LIKELIEST.blocks}),
    ]

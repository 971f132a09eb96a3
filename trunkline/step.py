"""The step interface: what the scheduler asks of a worker, and what comes back.

    handle = worker.submit(plan)     # returns at once
    result = worker.wait(handle)     # StepResult of that plan

One step may be in flight while the next is planned (`Worker.depth` = 1). A token that the step in flight is still
choosing is named in the next plan by the logits row that chooses it: `-1 - row`.

Letters: T token rows of the step, R requests in it, P page slots of the longest request, L rows whose logits are
wanted, K sums of hidden states, H numbers each. Neither side knows text.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from trunkline.sampling import SamplingParams

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]

# Tokens of a split: attention works through a context in splits that begin at multiples of this, counted from position 0, and
# merges their results in order. So what a row reads is computed alike whoever its neighbours are, and whatever was cached.
SPLIT = 512


class LogitsRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of logits that is wanted, and what to do with it.

    request   index of the request in the plan, 0 … R-1
    at        token row of the step whose hidden state gives the logits, 0 … T-1
    position  absolute position of the token these logits predict; with `seed` it keys the sampling noise
    sampling  how to choose that token; None: nothing is chosen. Then `target` is scored (prompt logprobs), or the row
              is only looked at: it fails if what it read is not sound, so that a prompt's chunk is never shared with a
              NaN in it
    seed      64-bit; the request's own, never None
    target    for a prompt's own token: the token id that follows, whose logprob is wanted; -1: none
    logprobs  number of alternatives to report; None: report nothing
    prompt    prompt token ids, output: generated ids so far; given only if `sampling.penalizes`. An output id may be
              `-1 - row` of the step in flight
    banned    token ids that must not be chosen (end-of-text before min_tokens)
    mask      row of `Plan.masks` that says which tokens may be chosen; -1: any
    fallback  token id that may be taken in place of the chosen one (scheduler/constraints.py): its logprob is reported,
              too; -1: none
    """

    request: int
    at: int
    position: int
    sampling: SamplingParams | None
    seed: int = 0
    target: int = -1
    logprobs: int | None = None
    prompt: Int32 | None = None
    output: Int32 | None = None
    banned: tuple[int, ...] = ()
    mask: int = -1
    fallback: int = -1


class CopyKind(enum.Enum):
    """From where to where whole pages are copied."""

    STORE = "store"  # device page → host slot
    LOAD = "load"  # host slot → device page
    FORK = "fork"  # device page → device page


class PageCopy(NamedTuple):
    """Pages to copy before a step computes. The copies of a plan are done in the order in which they stand.

    source, target  int32 [n]: device pages or host slots, as `kind` says; source[i] goes to target[i]
    """

    kind: CopyKind
    source: Int32
    target: Int32


class Masks(Protocol):
    """Which tokens the rows of a step may choose. They are filled while the step computes: whoever needs one waits."""

    def wait(self) -> Int32:
        """int32 [M, ceil(V/32)]: token i is bit i % 32 of word i // 32. Blocks until all are filled; never raises.

        A row without any bit set leaves nothing to choose: it fails.
        """


def mask_bits(mask: Int32) -> Bits:
    """Which tokens a row of Masks allows: bool [32 W]. Bits beyond the vocabulary stand for nothing."""
    return np.unpackbits(mask.astype("<i4", copy=False).view(np.uint8), bitorder="little").view(np.bool_)


def mask_words(token_ids: Iterable[int], vocab_size: int) -> Int32:
    """The row of Masks that allows these tokens and no others: int32 [ceil(V/32)]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class SharedRun(NamedTuple):
    """Tokens that several requests of a step read from the same pages: attention loads them once for all.

    requests    int32 [n], n ≥ 2, ascending: indices of requests in the plan
    start, end  positions of the first token and behind the last one, multiples of SPLIT

    The page tables of these requests agree there, and every row that they have in the step lies at `end` or behind it. Of
    one request, runs follow each other: they do not overlap.
    """

    requests: Int32
    start: int
    end: int


class PooledRows(NamedTuple):
    """Token rows whose hidden states, after the model's last norm, are wanted as one sum: what an embedding is made of.

    row         the logits row of the same chunk: it fails if the sum is not finite
    first, end  token rows first … end-1, all of that row's request
    """

    row: int
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that one step needs. Example: request 0 decodes at position 33, request 1 reads a chunk of 3 after 16 cached.

    step          7
    token_ids     int32 [T]    [812, 5, 6, 7]      -1-r: the token that logits row r of the step in flight chooses
    positions     int32 [T]    [33, 16, 17, 18]
    query_start   int32 [R+1]  [0, 1, 4]           rows query_start[r]:query_start[r+1] belong to request r
    context_len   int32 [R]    [34, 19]            tokens in the cache once this step's rows are written
    page_table    int32 [R,P]  [[9, 4, 7], [2, 3, 0]]   position p lies in page_table[r, p // page_size]; 0 pads
    rows          L LogitsRow  the rows whose logits are wanted, in the order of `at`
    copies        done first, in order, when all steps before are done. A plan may consist of copies alone: T, R, L = 0
    shared        what is read once for several requests, in no particular order; a saving, never a change
    masks         of the rows that name one; None: no row does
    pooled        K sums of hidden states that are wanted
    """

    step: int
    token_ids: Int32
    positions: Int32
    query_start: Int32
    context_len: Int32
    page_table: Int32
    rows: tuple[LogitsRow, ...]
    copies: tuple[PageCopy, ...] = ()
    shared: tuple[SharedRun, ...] = ()
    masks: Masks | None = None
    pooled: tuple[PooledRows, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self.context_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one row, of the model's own distribution (before temperature, penalties and bias).

    token_ids  int32 [1+k]    the chosen (or target) token, then the k likeliest, likeliest first
    logprobs   float32 [1+k]  natural logarithms, finite: at least -9999, which stands for "impossible"
    rank       rank of the chosen token in the vocabulary, 1 is the likeliest
    """

    token_ids: Int32
    logprobs: Float32
    rank: int


class StepMarks(NamedTuple):
    """When a worker in this process had come how far with a step: seconds on time.perf_counter.

    begun     its thread has the plan
    computed  logits and sums are there
    masked    so are the masks
    done      tokens are chosen
    """

    begun: float
    computed: float
    masked: float
    done: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step produced.

    token_ids     int32 [L]  the token each row of the plan chose; -1 where none was asked for, or the row failed
    logprobs      one entry per row; None where none was asked for
    failed        row -> why, e.g. its logits held a NaN. Such a request fails alone; its pages are never published
    copy_seconds  what the plan's copies took; 0 if that was not measured
    fallback_logprobs  row -> of its `fallback` token, where the row asks for logprobs and names one
    pooled        float64 [K, H]: the sums that the plan wants; None: it wants none
    marks         None: this kind of worker, or a step of copies alone, has none
    """

    step: int
    token_ids: Int32
    logprobs: tuple[RowLogprobs | None, ...]
    failed: dict[int, str] = field(default_factory=dict)
    copy_seconds: float = 0.0
    fallback_logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    pooled: Float64 | None = None
    marks: StepMarks | None = None


class Worker(Protocol):
    """Runs plans, in the order in which they are submitted.

    num_pages      pages of KV storage; page ids are 0 … num_pages-1
    page_size      tokens per page
    page_bytes     bytes of one page, all layers together
    host_pages     uint8 [host slots, page_bytes]: the slots that `Plan.copies` name, in memory that the engine process
                   reads and writes, too (the disk tier does); no slots: no tiers. Of a slot only whoever uses it right
                   now knows the content
    fingerprint    32 hex digits: equal only where the same tokens give the same bytes in a page; "" without a disk tier
    depth          steps that may be in flight while another is planned: 0 or 1
    """

    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def host_pages(self) -> UInt8: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def depth(self) -> int: ...

    def submit(self, plan: Plan) -> Any:
        """Start a step; at most `depth + 1` may be unfinished."""

    def wait(self, handle: Any) -> StepResult:
        """Block until the step is done.

        An exception means that the step is lost, and with it the requests that took part; an interrupted wait may be
        repeated.
        """

    def close(self) -> None:
        """Free the device. Idempotent."""

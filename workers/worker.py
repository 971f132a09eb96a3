"""The worker in the engine's own process: one model, its KV storage, and a thread for the steps that something goes on beside.

    worker = load_worker(config)
    handle = worker.submit(plan)      # starts the step, or lets it wait for the next line
    result = worker.wait(handle)      # StepResult

A step is: copy pages, fill in the tokens that the step before chose, forward, wait for the masks, sample. Without tokens,
copying is all of it. The plan is all it knows: no requests, no tree, no grammars.
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import msgspec
import numpy as np
import torch

from trunkline import __version__
from trunkline.config import EngineConfig, WorkerConfig
from trunkline.errors import ConfigError
from trunkline.kernels.collectives import ALONE, Collectives
from trunkline.kernels.select import available_cores, resolve_device
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.fingerprint import fingerprint
from trunkline.models.split import Split
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.step import Int32, Plan, StepMarks, StepResult
from trunkline.workers.kv_format import kv_dtype_on_cpu
from trunkline.workers.memory import available_memory, size_host_tier, size_pool
from trunkline.workers.plan_message import LAYOUT
from trunkline.workers.pooling import unsound
from trunkline.workers.runner import ModelRunner, load_runner
from trunkline.workers.sampler import sample
from trunkline.workers.step_thread import Handle, StepThread

if TYPE_CHECKING:
    from trunkline.workers.gpu_runner import GpuRunner
    from trunkline.workers.gpu_worker import GpuWorker
    from trunkline.workers.group import GroupWorker

SHORT_STEP = 64  # token rows: some milliseconds, of which two hand-overs from thread to thread would be felt


def load_worker(
    config: EngineConfig,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> "LocalWorker | GpuWorker | GroupWorker":
    """Read the checkpoint and allocate the KV storage; `on_progress(done, total)` follows the weights.

    tokenizer  the checkpoint's, if the caller has read it; None: it is read here
    on_lost    is told, from another thread, when another rank of the model has ended; None: the next step says so

    Raises ModelError if the checkpoint can't be served, ConfigError if a flag doesn't fit it or this machine.
    """
    if config.worker.tensor_parallel_size == 1:
        return load_part(config, ALONE, on_progress, tokenizer=tokenizer)
    from trunkline.workers.group import load_group

    return load_group(config, on_progress, tokenizer=tokenizer, on_lost=on_lost)


def load_part(
    config: EngineConfig,
    ranks: Collectives,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> "LocalWorker | GpuWorker":
    """What one rank of a model does of `load_worker`: all of it, if there is one rank. All ranks do it at the same time.

    Memory is counted per rank, and all ranks get as many pages as the one with the least room for them.
    """
    device = resolve_device(config.worker.device)
    checkpoint = open_checkpoint(config.model)
    Split(ranks.rank, ranks.size).check(checkpoint.config)
    parts = (__version__, LAYOUT, msgspec.json.encode((config, checkpoint.config)).decode())
    ranks.compare(_digest(*parts), "version, configuration or checkpoint")
    max_model_len = config.model.max_model_len or checkpoint.config.max_position_embeddings
    page_size = config.cache.block_size
    # A vocabulary may know ends that the config does not name, such as the mark that closes a chat turn. It is read beside the weights.
    beside = ThreadPoolExecutor(1, "tokenizer")
    reading = beside.submit(lambda: tokenizer or load_tokenizer(config.model.path))
    beside.shutdown(wait=False)
    runner: ModelRunner | GpuRunner
    if device == "cuda":
        from trunkline.workers.gpu_load import load_gpu_part  # Triton may be missing where there is no GPU

        gpu = load_gpu_part(checkpoint, config, max_model_len, on_progress, ranks)
        runner = gpu.runner
    else:
        threads = config.worker.threads or max(1, available_cores() // ranks.size)
        kv_dtype = kv_dtype_on_cpu(config.cache.kv_cache_dtype)
        runner = load_runner(
            checkpoint,
            config.model.dtype,
            threads,
            on_progress,
            ranks,
            quantization=config.model.quantization,
            kv_dtype=kv_dtype,
        )
    ranks.compare(_digest(runner.dtype, runner.numerics), "kind of kernels")
    # Ranks share the host's. All of them have read their weights by now, which lie in memory of the process's own.
    available = available_memory() // ranks.size
    if device == "cuda":
        num_pages = ranks.minimum(gpu.num_pages())
    else:
        num_pages = size_pool(
            config.cache,
            page_bytes=runner.page_bytes(page_size),
            max_model_len=max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            available=available,
            num_ranks=ranks.size,
        )
        num_pages = ranks.minimum(num_pages)
        available -= num_pages * runner.page_bytes(page_size)
    num_host_slots = size_host_tier(config.cache, page_bytes=runner.page_bytes(page_size), available=available)
    num_host_slots = ranks.minimum(num_host_slots)
    name = ""
    if config.cache.disk_cache_dir is not None:  # large checkpoints take seconds, the first time
        name = fingerprint(checkpoint, dtype=runner.dtype, numerics=runner.numerics, page_size=page_size)
    tokenizer = reading.result()
    attributes: Attributes = {
        "page_size": page_size,
        "max_model_len": max_model_len,
        "eos_token_ids": tuple(dict.fromkeys((*checkpoint.eos_token_ids, *tokenizer.eos_token_ids))),
        "num_host_slots": num_host_slots,
        "fingerprint": name,
        "tokenizer": tokenizer,
    }
    if device == "cuda":
        return gpu.worker(num_pages, **attributes)
    assert isinstance(runner, ModelRunner)
    runner.allocate(num_pages, page_size)
    return LocalWorker(runner, num_pages=num_pages, starts_at_once=ranks.size > 1, **attributes)


class Attributes(TypedDict):
    """What every worker is told, by the names of its attributes."""

    page_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_host_slots: int
    fingerprint: str
    tokenizer: Tokenizer


def device_of(config: WorkerConfig, rank: int) -> torch.device:
    """Where this rank of a model keeps its tensors: on a GPU of its own, if GPUs compute.

    Raises ConfigError if there are fewer GPUs than ranks.
    """
    if resolve_device(config.device) != "cuda" or not torch.cuda.is_available():
        return torch.device("cpu")
    if (count := torch.cuda.device_count()) < config.tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size is {config.tensor_parallel_size}, but of GPUs there {'is' if count == 1 else 'are'}"
            f" {count}, and each rank takes one."
        )
    return torch.device("cuda", rank)


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()


class LocalWorker:
    """A Worker (see trunkline/step.py) that runs its steps in the order of `submit`, on one thread of its own, or in `wait`.

    dtype           storage of the weights, e.g. "float16"
    device          for people, e.g. "cpu (2 threads, compiled kernels for avx2)"
    vocab_size      token ids are 0 … vocab_size-1
    eos_token_ids   any of them ends the text
    max_model_len   tokens of one request, prompt and output together
    tokenizer       the checkpoint's; grammars are compiled for its vocabulary. None: no grammars
    starts_at_once  no step waits for `wait`, since others compute it too

    depth 0, the default, is right where the CPU is the device: planning ahead would take the cores from the step
    itself, and compute one token too many for every request that ends. depth 1 pays where cores are left over.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        depth: int = 0,
        num_host_slots: int = 0,
        fingerprint: str = "",
        tokenizer: Tokenizer | None = None,
        starts_at_once: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = runner.page_bytes(page_size)
        self.host_pages = np.empty((num_host_slots, self.page_bytes), np.uint8)
        self.fingerprint = fingerprint
        self.depth = depth
        self.dtype = runner.dtype
        self.device = runner.device
        self.vocab_size = runner.config.vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self._runner: ModelRunner | None = runner
        self._starts_at_once = starts_at_once
        self._thread = StepThread[StepResult]()
        self._previous: StepResult | None = None  # of the step that ran last; only a step touches it

    def submit(self, plan: Plan) -> Handle[StepResult]:
        """Start the step, or queue it behind the one that runs. A short one that nothing can go on beside waits for `wait`."""
        alone = not (self.depth or self._starts_at_once or plan.copies) and plan.masks is None
        return self._thread.submit(
            self._run, plan, depth=self.depth, when_asked=alone and plan.num_tokens <= SHORT_STEP
        )

    def wait(self, handle: Handle[StepResult]) -> StepResult:
        """The result; a wait that is interrupted may be repeated.

        Raises ValueError, before anything is computed, for a plan that contradicts itself or leaves the KV storage.
        """
        try:
            return handle.result()
        finally:
            if handle.done():
                self._thread.finished(handle)

    def close(self) -> None:
        """Let the step that runs end, drop the others, and give the memory back."""
        self._thread.close()
        self._runner = None

    @property
    def runner(self) -> ModelRunner:
        """The model and its pages. Raises RuntimeError once the worker is closed."""
        if self._runner is None:
            raise RuntimeError("The worker is closed; load another one.")
        return self._runner

    def _run(self, plan: Plan) -> StepResult:
        assert self._runner is not None
        begun = time.perf_counter()
        previous, self._previous = self._previous, None  # if this step raises, so does the next that builds on it
        check_rows(plan)
        copy_seconds = self._copy(plan)
        if not plan.num_tokens:
            return StepResult(step=plan.step, token_ids=np.empty(0, np.int32), logprobs=(), copy_seconds=copy_seconds)
        resolved, orphans = resolve_futures(plan, previous)
        logits = self._runner.forward(resolved, resolved.token_ids)
        pooled = self._runner.pool(plan) if plan.pooled else None
        computed = time.perf_counter()
        masks = plan.masks.wait() if plan.masks is not None else None  # they were filled meanwhile
        masked = time.perf_counter()
        samples = sample(logits, resolved.rows, masks)
        logprobs = list(samples.logprobs)
        for index in orphans:
            samples.token_ids[index] = -1
            logprobs[index] = None
        self._previous = StepResult(
            step=plan.step,
            token_ids=samples.token_ids,
            logprobs=tuple(logprobs),
            failed=samples.failed | orphans | (unsound(pooled, plan) if pooled is not None else {}),
            copy_seconds=copy_seconds,
            fallback_logprobs=samples.fallback_logprobs,
            pooled=pooled,
            marks=StepMarks(begun, computed, masked, time.perf_counter()),
        )
        return self._previous

    def _copy(self, plan: Plan) -> float:
        """Do the plan's copies; returns the seconds that took."""
        assert self._runner is not None
        started_at = time.perf_counter()
        for copy in plan.copies:
            self._runner.copy_pages(copy, self.host_pages)
        return time.perf_counter() - started_at


def check_rows(plan: Plan) -> None:
    """Every row of logits must be a token row of its request, and so must those that are summed. (The runner checks the rest of
    the plan.)"""
    for row in plan.rows:
        if not 0 <= row.request < plan.num_requests:
            raise ValueError(f"Step {plan.step} wants logits of request {row.request}; it has {plan.num_requests}.")
        first, end = plan.query_start[row.request], plan.query_start[row.request + 1]
        if not first <= row.at < end:
            raise ValueError(
                f"Step {plan.step} wants logits of token row {row.at}; those of request {row.request} are {first} to {end - 1}."
            )
    for rows in plan.pooled:
        if not 0 <= rows.row < len(plan.rows):
            raise ValueError(
                f"Step {plan.step} sums hidden states for row {rows.row} of logits; it has {len(plan.rows)}."
            )
        request = plan.rows[rows.row].request
        first, end = plan.query_start[request], plan.query_start[request + 1]
        if not first <= rows.first < rows.end <= end:
            raise ValueError(
                f"Step {plan.step} sums token rows {rows.first} to {rows.end - 1}; those of request {request} are {first} to"
                f" {end - 1}."
            )


class Resolved(NamedTuple):
    """A plan without future tokens, and the rows that can't be answered because one before them failed: row -> why."""

    plan: Plan
    orphans: dict[int, str]


def resolve_futures(plan: Plan, previous: StepResult | None) -> Resolved:
    """Put the token that row r of `previous` chose in the place of each `-1 - r`, in token_ids and in the rows' output.

    A request that builds on a failed row is computed with token 0 in its place, for a step is one batch; its rows are
    orphans.
    """
    if not (plan.token_ids < 0).any():
        return Resolved(plan, {})
    if previous is None:
        raise ValueError(f"Step {plan.step} builds on a step that did not end well.")
    chosen = previous.token_ids.copy()
    chosen[list(previous.failed)] = 0
    rows = [
        row if row.output is None else msgspec.structs.replace(row, output=_fill_in(row.output, chosen))
        for row in plan.rows
    ]
    return Resolved(
        replace(plan, token_ids=_fill_in(plan.token_ids, chosen), rows=tuple(rows)), find_orphans(plan, previous)
    )


def find_orphans(plan: Plan, previous: StepResult) -> dict[int, str]:
    """Rows of requests whose token a failed row of `previous` should have chosen: row -> why."""
    if not previous.failed:
        return {}
    lost: dict[int, str] = {}  # request -> why
    for at in np.flatnonzero(plan.token_ids < 0):
        if (why := previous.failed.get(-1 - int(plan.token_ids[at]))) is not None:
            lost[int(np.searchsorted(plan.query_start, at, side="right")) - 1] = why
    return {index: lost[row.request] for index, row in enumerate(plan.rows) if row.request in lost}


def _fill_in(token_ids: Int32, chosen: Int32) -> Int32:
    filled = token_ids.copy()
    future = token_ids < 0
    filled[future] = chosen[-1 - token_ids[future]]
    return filled

"""From a checkpoint to a GPU worker: kernels, weights, the size of the KV storage, CUDA graphs.

    part = load_gpu_part(checkpoint, config, max_model_len)      # weights are read
    num_pages = part.num_pages()                                 # measures; all ranks take the least of theirs
    worker = part.worker(num_pages, …)                           # allocates and captures

Without a GPU, all of this runs on the CPU, in Triton's interpreter.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from trunkline.config import DTYPES, EngineConfig
from trunkline.errors import ConfigError
from trunkline.kernels.collectives import ALONE, Collectives
from trunkline.kernels.select import gpu_kernels
from trunkline.models.checkpoint import Checkpoint
from trunkline.models.layers import Loader
from trunkline.models.registry import make_model
from trunkline.models.split import Split
from trunkline.sampling import SamplingParams
from trunkline.step import LogitsRow, Plan
from trunkline.workers.device import CudaDevice, Device, DeviceMemory, HostDevice
from trunkline.workers.device_sampler import DeviceSampler
from trunkline.workers.gpu_memory import Footprint, measure, size_gpu_pool
from trunkline.workers.gpu_runner import GpuRunner, Room
from trunkline.workers.gpu_worker import GpuWorker, Sampler
from trunkline.workers.kv_format import kv_dtype_on_gpu
from trunkline.workers.memory import DEFAULT_KV_CACHE_MEMORY, available_memory

logger = logging.getLogger("trunkline.worker")


def open_device() -> Device:
    """This process's GPU; without one, the host, of whose memory KV pages get no more than on the CPU backend."""
    if torch.cuda.is_available():
        return CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    size = min(DEFAULT_KV_CACHE_MEMORY, available_memory() // 2)
    return HostDevice(lambda: DeviceMemory(size, size))


def load_gpu_part(
    checkpoint: Checkpoint,
    config: EngineConfig,
    max_model_len: int,
    on_progress: Callable[[int, int], None] | None = None,
    ranks: Collectives = ALONE,
) -> "GpuPart":
    """Read this rank's weights onto its GPU.

    Raises ModelError if the checkpoint's tensors do not fit, ConfigError if the GPU can't do what is asked for.
    """
    stored = checkpoint.stored_quantization
    if config.model.quantization not in ("auto", "none") and (
        stored in (None, "gguf") or config.model.quantization != stored
    ):
        raise ConfigError(
            f"--quantization is '{config.model.quantization}', which the GPU kernels do not have: they take weights as --dtype says. Please"
            " leave it out, or use --device cpu."
        )
    device = open_device()
    dtype = _storage_dtype(config.model.dtype, checkpoint.config.dtype)
    split = Split(ranks.rank, ranks.size)
    kernels = gpu_kernels(
        dtype,
        head_dim=checkpoint.config.head_dim,
        query_heads=split.config(checkpoint.config).num_heads,
        max_model_len=max_model_len,
        kv_dtype=kv_dtype_on_gpu(config.cache.kv_cache_dtype, dtype),
    )
    scheduler = config.scheduler
    rows = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    room = Room(scheduler.max_num_seqs, rows, max_model_len)
    try:
        loader = Loader(checkpoint.tensors(on_progress, split), kernels, dtype, ranks)
        model = make_model(checkpoint.config, loader)
        runner = GpuRunner(model, kernels, dtype, device, room)
        sampler = DeviceSampler(runner.config.vocab_size, room.logits_rows, device.torch_device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The weights of {config.model.path} do not fit into {device.name}: {error}. Please take a smaller model, a GPU"
            " with more memory, or several GPUs with --tensor-parallel-size."
        ) from error
    return GpuPart(config, max_model_len, runner, sampler, device)


def _storage_dtype(wanted: str, checkpoint: str) -> torch.dtype:
    """Of weights and activations. "auto": bfloat16 for checkpoints in it, else float16."""
    if wanted not in DTYPES:
        raise ConfigError(f"--dtype is '{wanted}'; allowed are {', '.join(DTYPES)}.")
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    return torch.bfloat16 if checkpoint == "bfloat16" else torch.float16


class GpuPart:
    """What one rank holds, before it has pages.

    runner   has its weights
    """

    def __init__(
        self, config: EngineConfig, max_model_len: int, runner: GpuRunner, sampler: Sampler, device: Device
    ) -> None:
        self.runner = runner
        self._config = config
        self._max_model_len = max_model_len
        self._sampler = sampler
        self._device = device
        self._has_graphs = runner.is_fixed and not config.worker.enforce_eager

    def num_pages(self) -> int:
        """Pages that there is memory for; see gpu_memory.size_gpu_pool.

        Raises ConfigError if there is too little.
        """
        config = self._config
        return size_gpu_pool(
            config.cache,
            utilization=config.worker.gpu_memory_utilization,
            footprint=self._footprint(),
            page_bytes=self.runner.page_bytes(config.cache.block_size),
            max_model_len=self._max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            name=self._device.name,
        )

    def worker(self, num_pages: int, **attributes: Any) -> GpuWorker:
        """Allocate the pages, capture the graphs, and hand all of it to a worker with these `attributes`.

        Raises ConfigError for a page size that the kernels can't do, or if memory runs out.
        """
        config = self._config
        try:
            self.runner.allocate(num_pages, config.cache.block_size)
            if self._has_graphs:
                with tqdm(desc="Capturing CUDA graphs", unit="graph", leave=False, disable=None) as bar:
                    self.runner.capture(lambda done, total: _show(bar, done, total))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self._device.name} ran out of memory for {num_pages} pages of KV cache and the CUDA graphs: {error}. Please"
                f" lower --gpu-memory-utilization, which is {config.worker.gpu_memory_utilization:g}, or"
                " --kv-cache-memory; or do without graphs: --enforce-eager."
            ) from error
        return GpuWorker(self.runner, self._sampler, self._device, num_pages=num_pages, **attributes)

    def _footprint(self) -> Footprint:
        """Nothing is measured if nothing depends on it, or where the memory is the host's."""
        config, device = self._config, self._device
        if config.cache.num_pages is not None or config.cache.kv_cache_memory is not None or not is_gpu(device):
            device.trim()
            memory = device.memory()
            return Footprint(memory.total, memory.total - memory.free, 0)
        try:
            self.runner.allocate(1, config.cache.block_size)
            captures = self.runner.captures() if self._has_graphs else []
            return measure(device, self.run_largest_step, captures)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"Beside the weights, {device.name} has no memory for a step of --max-num-batched-tokens"
                f" {config.scheduler.max_num_batched_tokens} tokens of --max-num-seqs {config.scheduler.max_num_seqs} requests:"
                f" {error}. Please lower one of them."
            ) from error

    def run_largest_step(self) -> None:
        """A step with as many rows, requests, tokens to read and tokens to choose as there can be.

        All of it happens in page 0, so one page will do.
        """
        scheduler = self._config.scheduler
        plan = largest_plan(
            num_requests=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
            num_rows=scheduler.max_num_batched_tokens,
            num_chosen=scheduler.max_num_seqs * (1 + scheduler.num_speculative_tokens),
            num_forks=scheduler.max_num_seqs,
            max_model_len=self._max_model_len,
            page_size=self._config.cache.block_size,
        )
        forward = self.runner.prepare(plan, self.runner.check(plan, 0))
        prepared = self._sampler.prepare(plan.rows)
        self._device.launch(lambda: self._sampler.sample(forward(), prepared, None, None))
        self._device.synchronize()


def is_gpu(device: Device) -> bool:
    """False: its memory is the host's."""
    return device.torch_device.type != "cpu"


def largest_plan(
    *, num_requests: int, num_rows: int, num_chosen: int, num_forks: int, max_model_len: int, page_size: int
) -> Plan:
    """A step of requests at the end of the longest context. The first ones read prompts, as far as there are rows for it.

    num_chosen  token rows, at most, that choose a token, with logits to be adjusted; the others score one of the prompt
    num_forks   rows that choose a token beside those, by the logits of the last token row
    """
    counts = np.ones(num_requests, np.int64)
    for request in range(num_requests):
        counts[request] += min(num_rows - counts.sum(), max_model_len - 1)
    starts = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(num_requests), counts)
    positions = max_model_len - counts[owner] + np.arange(len(owner)) - starts[owner]
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    wanted = [*range(len(owner)), *[len(owner) - 1] * num_forks]
    num_scored = max(0, len(owner) - num_chosen)
    return Plan(
        step=-1,
        token_ids=np.zeros(len(owner), np.int32),
        positions=positions.astype(np.int32),
        query_start=starts.astype(np.int32),
        context_len=np.full(num_requests, max_model_len, np.int32),
        page_table=np.zeros((num_requests, -(-max_model_len // page_size)), np.int32),
        rows=tuple(
            LogitsRow(
                request=int(owner[at]),
                at=at,
                position=int(positions[at]) + 1,
                sampling=sampling if index >= num_scored else None,
                target=0 if index < num_scored else -1,
                logprobs=1,
                banned=(0,) if index >= num_scored else (),
            )
            for index, at in enumerate(wanted)
        ),
    )


def _show(bar: "tqdm[Any]", done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)

"""Loading a GPU worker, in Triton's interpreter: the tokens of the CPU worker, with graphs and without; what is refused."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.tiny import tiny_gguf, tiny_model
from tests.workers.fake_device import FakeDevice, HashKernels, HashModel, HashSampler
from tests.workers.test_worker import Request, make_plan, run
from trunkline.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, WorkerConfig
from trunkline.errors import ConfigError
from trunkline.step import SPLIT, SharedRun
from trunkline.workers.gpu_load import GpuPart, largest_plan
from trunkline.workers.gpu_runner import GpuRunner, Room
from trunkline.workers.gpu_worker import GpuWorker
from trunkline.workers.worker import load_worker

NEEDS_INTERPRETER = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def make_config(model: str, *, device="cuda", enforce_eager=False, dtype="float32", **cache) -> EngineConfig:
    return EngineConfig(
        model=ModelSource(path=model, dtype=dtype, max_model_len=160),
        cache=CacheConfig(**{"num_pages": 40} | cache),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48),
        worker=WorkerConfig(device=device, threads=1, enforce_eager=enforce_eager),
    )


PROMPTS = [list(range(60, 97)), [104, 101, 108, 108, 111]]


@pytest.fixture(scope="module")
def cpu_texts(model) -> list[list[int]]:
    worker: Any = load_worker(make_config(model, device="cpu"))
    texts = []
    for prompt in PROMPTS:
        request = Request(list(prompt), pages=[5, 2, 9])
        run(worker, (request, len(prompt)))
        for _ in range(5):
            run(worker, (request, 1))
        texts.append(request.tokens)
    worker.close()
    return texts


@NEEDS_INTERPRETER
@pytest.mark.slow
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_are_those_of_the_cpu_worker(model, cpu_texts, enforce_eager):
    """One prompt in two chunks, the other joining in the middle; then a step in flight all the time."""
    worker = load_worker(make_config(model, enforce_eager=enforce_eager))
    assert isinstance(worker, GpuWorker) and worker.depth == 1 and worker.dtype == "float32"
    a, b = Request(list(PROMPTS[0]), pages=[1, 30, 7]), Request(list(PROMPTS[1]), pages=[11, 4])
    run(worker, (a, 20))
    run(worker, (a, 17), (b, 5))
    handles, tokens = [], []
    for step in range(5):
        first = step == 0
        for row, request in enumerate((a, b)):
            request.computed = len(request.tokens) - first
            if not first:
                request.tokens.append(-1 - row)
        handles.append(worker.submit(make_plan((a, 1), (b, 1), step=step)))
        if not first:
            tokens.append(worker.wait(handles.pop(0)).token_ids.tolist())
    tokens.append(worker.wait(handles.pop()).token_ids.tolist())
    worker.close()
    texts = [
        [*(token for token in request.tokens if token >= 0), *chosen]
        for request, chosen in zip((a, b), np.transpose(tokens).tolist(), strict=True)
    ]
    assert texts == cpu_texts


@NEEDS_INTERPRETER
@pytest.mark.slow
def test_a_shared_run_in_a_graph_changes_nothing(tmp_path):
    """Two requests that share a split, in pages filled at random: by graph, eagerly, and each for itself."""
    path = str(tiny_model(tmp_path / "tiny", num_layers=1, max_position_embeddings=1024))
    config = EngineConfig(
        model=ModelSource(path=path, dtype="float32"),
        cache=CacheConfig(num_pages=70),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cuda"),
    )
    shared = list(range(2, 2 + SPLIT // 16))
    requests = [
        Request([1] * length, [*shared, 40 + index], length - 1) for index, length in enumerate((SPLIT + 9, SPLIT + 3))
    ]
    plan = make_plan(*((request, 1) for request in requests))
    run_of_both = SharedRun(np.array([0, 1], np.int32), 0, SPLIT)
    results = []
    for enforce_eager, runs in ((False, (run_of_both,)), (True, (run_of_both,)), (False, ())):
        worker = load_worker(
            msgspec.structs.replace(config, worker=WorkerConfig(device="cuda", enforce_eager=enforce_eager))
        )
        kv = worker._runner._kv
        for pool in (kv.keys, kv.values):
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
        result = worker.wait(worker.submit(replace(plan, shared=runs)))
        assert not result.failed
        results.append([(row.token_ids.tolist(), row.logprobs.tolist()) for row in result.logprobs])
        worker.close()
    assert results[0] == results[1] == results[2]


@NEEDS_INTERPRETER
def test_it_says_what_it_is(model):
    worker = load_worker(make_config(model, enforce_eager=True, dtype="auto"))
    assert (worker.dtype, worker.num_pages, worker.page_size, worker.max_model_len) == ("float16", 40, 16, 160)
    assert worker.device == "cuda (the host, Triton's interpreter, to be looked at)"
    assert worker.page_bytes == 2 * 2 * 2 * 16 * 16 * 2
    worker.close()


@NEEDS_INTERPRETER
def test_pages_of_fp8_take_a_quarter_of_float32s(model):
    worker = load_worker(make_config(model, enforce_eager=True, kv_cache_dtype="fp8"))
    assert worker.page_bytes == 2 * 2 * 2 * 16 * 16
    assert "float8" in worker._runner.numerics, "pages on disk are told apart"
    worker.close()


@NEEDS_INTERPRETER
def test_pages_are_float8_or_as_the_weights_are(model):
    worker = load_worker(make_config(model, enforce_eager=True, dtype="float16", kv_cache_dtype="float16"))
    assert worker.page_bytes == 2 * 2 * 2 * 16 * 16 * 2
    worker.close()
    with pytest.raises(ConfigError, match="--kv-cache-dtype is 'float32', but weights are float16"):
        load_worker(make_config(model, enforce_eager=True, dtype="float16", kv_cache_dtype="float32"))


@NEEDS_INTERPRETER
@pytest.mark.parametrize("quantization", ["gguf", "int8"])
def test_weights_in_fewer_bits_are_refused(tmp_path, quantization):
    file = str(tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0"))
    config = make_config(file)
    with pytest.raises(ConfigError, match=f"--quantization is '{quantization}', which the GPU kernels do not have"):
        load_worker(
            msgspec.structs.replace(config, model=ModelSource(path=file, quantization=quantization, max_model_len=160))
        )


@NEEDS_INTERPRETER
def test_a_page_size_without_kernels_is_refused(model):
    with pytest.raises(ConfigError, match="--block-size is 8; allowed are 16, 32, 64"):
        load_worker(make_config(model, block_size=8))


@NEEDS_INTERPRETER
def test_a_pool_too_small_is_refused(model):
    with pytest.raises(ConfigError, match="The KV cache holds 160 tokens"):
        load_worker(make_config(model, num_pages=10))


# The measuring, on a fake device.


class Card(FakeDevice):
    """A GPU to those that ask; every forward pass so far has left something allocated."""

    def __init__(self, total: int) -> None:
        super().__init__(total=total)
        self.trimmed = 0

    def trim(self) -> None:
        self.trimmed += 1


def make_part(monkeypatch, *, total=2**20, enforce_eager=False, per_step=0, utilization=0.9, **cache) -> GpuPart:
    monkeypatch.setattr("trunkline.workers.gpu_load.is_gpu", lambda device: True)
    config = EngineConfig(
        model=ModelSource(path="hash"),
        cache=CacheConfig(**{"block_size": 4} | cache),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, num_speculative_tokens=1),
        worker=WorkerConfig(enforce_eager=enforce_eager, gpu_memory_utilization=utilization),
    )
    device = Card(total)
    device.used = 1000
    model = HashModel()
    forward = model.forward

    def allocating_forward(ids, *rest):
        if len(ids) == 16:
            device.used += per_step
        return forward(ids, *rest)

    model.forward = allocating_forward  # type: ignore[method-assign]
    kernels: Any = HashKernels()
    runner = GpuRunner(model, kernels, torch.float32, device, Room(3, 16, 32))
    return GpuPart(config, 32, runner, HashSampler(), device)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_largest_step_is_measured_before_pages_are_counted(monkeypatch, enforce_eager):
    """A page is 64 bytes."""
    part = make_part(monkeypatch, per_step=5000, enforce_eager=enforce_eager)
    assert part.num_pages() == (int(0.9 * 2**20) - 6000) // 64
    worker = part.worker(20, page_size=4, max_model_len=32)
    assert worker.num_pages == 20
    pools = [graph.pool for graph in part._device.captured]
    assert len(pools) == (0 if enforce_eager else 2 + 3), "two to be measured, then all"
    assert len(set(pools[:2])) == len(set(pools[2:])) == (0 if enforce_eager else 1)
    assert not set(pools[:2]) & set(pools[2:]), "a pool is gone with its graphs"
    worker.close()


def test_nothing_is_measured_if_pages_are_given(monkeypatch):
    part = make_part(monkeypatch, per_step=5000, kv_cache_memory=640)
    assert part.num_pages() == 10 and part._device.used == 1000


def test_too_little_memory_names_the_flag(monkeypatch):
    part = make_part(monkeypatch, total=1600, enforce_eager=True)
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization 0\.9 of fake's 1\.6 KiB.*one request of --max-model-len 32"
    ):
        part.num_pages()


def test_memory_that_runs_out_names_the_flags(monkeypatch):
    part = make_part(monkeypatch)

    def run_out(*arguments):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(part.runner, "capture", run_out)
    with pytest.raises(ConfigError, match=r"lower --gpu-memory-utilization, which is 0\.9.*--enforce-eager"):
        part.worker(20, page_size=4, max_model_len=32)
    monkeypatch.setattr(part.runner, "prepare", run_out)
    with pytest.raises(
        ConfigError, match="no memory for a step of --max-num-batched-tokens 16 tokens of --max-num-seqs 3"
    ):
        part.num_pages()


@pytest.mark.parametrize(
    ("rows", "counts"), [(16, [14, 1, 1]), (3, [1, 1, 1]), (80, [32, 32, 16]), (200, [32, 32, 32])]
)
def test_the_largest_plan(rows, counts):
    plan = largest_plan(num_requests=3, num_rows=rows, num_chosen=6, num_forks=2, max_model_len=32, page_size=4)
    assert np.diff(plan.query_start).tolist() == counts
    assert plan.context_len.tolist() == [32, 32, 32] and plan.page_table.shape == (3, 8)
    assert plan.positions.max() == 31 and plan.positions.min() == 32 - max(counts)
    assert [row.at for row in plan.rows] == [*range(sum(counts)), *[sum(counts) - 1] * 2]
    assert [row.sampling is None for row in plan.rows] == [index < sum(counts) - 6 for index in range(sum(counts) + 2)]

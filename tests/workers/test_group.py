"""A model on several ranks, in real processes: the same as on one, and nobody is left over, however it ends."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.test_split import HEADS
from tests.reference_model import greedy_gaps, load_reference
from tests.tiny import VOCAB_SIZE, tiny_gguf, tiny_model
from tests.workers.plans import Chunk, make_plan, need_compiler
from trunkline import LLM, SamplingParams
from trunkline.config import CacheConfig, EngineConfig, ModelSource, WorkerConfig, engine_config
from trunkline.errors import ConfigError, EngineDead, StartupError
from trunkline.models.checkpoint import builtin_model
from trunkline.step import CopyKind, PageCopy, StepResult
from trunkline.workers import group as group_module
from trunkline.workers import sampler as sampler_module
from trunkline.workers import worker as worker_module
from trunkline.workers.group import GroupWorker
from trunkline.workers.worker import device_of, load_worker

NUM_PAGES = 40
PATIENCE = 60.0  # seconds; only for what would otherwise hang
PROMPT = np.random.default_rng(3).integers(0, VOCAB_SIZE, 90).tolist()


def make_config(path: Path, size: int, *, quantization: str = "auto", **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelSource(path=str(path), dtype="float32", quantization=quantization),
        cache=CacheConfig(num_pages=NUM_PAGES, **cache),
        worker=WorkerConfig(device="cpu", threads=1, tensor_parallel_size=size),
    )


def run(worker: Any, chunks: list[Chunk], *, all_rows: bool = False, copies: tuple[PageCopy, ...] = ()) -> StepResult:
    plan = replace(make_plan(chunks, all_rows=all_rows), copies=copies)
    return worker.wait(worker.submit(plan))


class Logits:
    """Those of every step since the last `take`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: list[torch.Tensor] = []
        original = sampler_module.sample

        def sample(logits: torch.Tensor, *rest: Any) -> Any:
            self._seen.append(logits.clone())
            return original(logits, *rest)

        monkeypatch.setattr(worker_module, "sample", sample)

    def take(self) -> torch.Tensor:
        seen, self._seen = self._seen, []
        return torch.cat(seen)


def is_gone(pidfd: int) -> bool:
    """True once the process is gone."""
    readable, _, _ = select.select([pidfd], [], [], PATIENCE)
    os.close(pidfd)
    return bool(readable)


def both_texts(worker_of: Callable[[int], Any], logits: Logits) -> list[torch.Tensor]:
    """Of one rank and of two: PROMPT in two chunks, then six tokens that are given, not chosen; all logits."""
    results = []
    for size in (1, 2):
        worker = worker_of(size)
        try:
            pages, forced = [7, 2, 9, 11, 4, 0], [5, 80, 200, 3, 77, 150]
            run(worker, [Chunk(PROMPT, 0, 40, pages)], all_rows=True)
            run(worker, [Chunk(PROMPT, 40, 90, pages)], all_rows=True)
            text = PROMPT + forced
            for at in range(90, 96):
                run(worker, [Chunk(text, at, at + 1, pages), Chunk(PROMPT, at - 90, at - 89, [20])], all_rows=True)
        finally:
            worker.close()
        results.append(logits.take())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_two_ranks_have_the_logits_of_one(tmp_path: Path, heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path / "tiny", attention_bias=True, mlp_bias=True, **HEADS[heads])
    one, two = both_texts(lambda size: load_worker(make_config(folder, size)), Logits(monkeypatch))
    assert one.shape == two.shape == (90 + 12, VOCAB_SIZE)
    assert float((one - two).abs().max()) < 1e-4
    assert not torch.equal(one, two), "they were added up in another way"


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "tolerance"), [("none", 1e-4), ("gguf", 5e-3), ("int8", 0.15)])
def test_a_gguf_file_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, tolerance: float
) -> None:
    """Beside packed weights, activations are rounded to 16 bits of the largest in a row: of a rank's part of it, another. And int8 takes its
    scales from a rank's part."""
    file = tiny_gguf(tmp_path / "tiny.gguf", quantization="Q8_0")
    configs = {size: make_config(file, size, quantization=quantization) for size in (1, 2)}
    one, two = both_texts(lambda size: load_worker(configs[size]), Logits(monkeypatch))
    assert float((one - two).abs().max()) < tolerance * float(one.std())


# One group for the tests that leave it in good health.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_kv_heads=4)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Any]:
    worker = load_worker(make_config(folder, 1, host_cache_memory=2**20))
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Any]:
    worker = load_worker(make_config(folder, 2, host_cache_memory=2**20))
    yield worker
    worker.close()


@pytest.mark.slow
def test_it_says_what_it_is(alone: Any, pair: Any) -> None:
    assert isinstance(pair, GroupWorker) and pair.depth == 0
    assert pair.device.startswith("2 × cpu (1 thread")
    assert 2 * pair.page_bytes == alone.page_bytes, "half of the kv heads"
    assert len(pair.host_pages) == 2 * len(alone.host_pages), "memory is counted per rank"
    for name in ("num_pages", "page_size", "vocab_size", "eos_token_ids", "max_model_len", "dtype", "fingerprint"):
        assert getattr(pair, name) == getattr(alone, name), name


@pytest.mark.slow
def test_every_rank_copies_its_slice(alone: Any, pair: Any) -> None:
    """A prompt's pages go to host memory, are written over, and come back to other pages, once more by a copy on the device."""

    def copy(kind: CopyKind, source: list[int], target: list[int]) -> PageCopy:
        return PageCopy(kind, np.array(source, np.int32), np.array(target, np.int32))

    tokens = []
    for worker in (alone, pair):
        run(worker, [Chunk(PROMPT, 0, 48, [1, 2, 3])])
        run(worker, [Chunk(PROMPT[::-1], 0, 48, [1, 2, 3])], copies=(copy(CopyKind.STORE, [1, 2, 3], [6, 0, 5]),))
        back = (copy(CopyKind.LOAD, [6, 0, 5], [8, 1, 9]), copy(CopyKind.FORK, [1], [10]))
        tokens.append(run(worker, [Chunk(PROMPT, 48, 60, [8, 10, 9, 4])], copies=back).token_ids.tolist())
        whole = run(worker, [Chunk(PROMPT, 0, 60, [11, 12, 13, 14])]).token_ids.tolist()
        assert whole == tokens[-1]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunk",
    [
        Chunk([1, 2], 0, 2, [NUM_PAGES]),
        Chunk([1] * 17, 0, 17, [3]),
        Chunk([1, VOCAB_SIZE], 0, 2, [3]),
        Chunk([-1], 0, 1, [3]),
    ],
)
def test_a_plan_that_leads_astray_reaches_no_rank(pair: Any, chunk: Chunk) -> None:
    with pytest.raises(ValueError, match=r"page|token|context_len|pages|vocabulary"):
        pair.submit(make_plan([chunk]))
    none = PageCopy(CopyKind.LOAD, np.array([10**6], np.int32), np.array([0], np.int32))
    with pytest.raises(ValueError, match="names 1 as source"):
        pair.submit(replace(make_plan([Chunk([1], 0, 1, [3])]), copies=(none,)))
    assert len(run(pair, [Chunk([1, 2], 0, 2, [3])]).token_ids) == 1


# Ends.


@pytest.mark.slow
def test_a_rank_that_is_killed(folder: Path) -> None:
    told: list[str] = []
    worker = load_worker(make_config(folder, 3 - 1), on_lost=told.append)
    assert isinstance(worker, GroupWorker)
    run(worker, [Chunk([1, 2], 0, 2, [3])])
    (pid,) = worker.group.pids
    os.kill(pid, signal.SIGKILL)
    why = f"Rank 1 of 2 (process {pid}) has ended, by signal SIGKILL"
    with pytest.raises(EngineDead, match=r"process .* by signal SIGKILL"):
        for _ in range(100):  # the first may still have been sent
            run(worker, [Chunk([1, 2], 0, 2, [3])])
    assert worker.group.lost.result(PATIENCE).startswith(why)
    with pytest.raises(EngineDead, match="by signal SIGKILL"):
        worker.submit(make_plan([Chunk([1], 0, 1, [3])]))
    assert [text.startswith(why) for text in told] == [True]
    worker.close()
    worker.close()


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_middle_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is dead before rank 0's step begins, and does not know of it: the step ends with an error, and does not hang."""
    worker = load_worker(make_config(folder, 2))
    assert isinstance(worker, GroupWorker)
    (pid,) = worker.group.pids
    runner: Any = worker._worker._runner
    pidfd, original = os.pidfd_open(pid), runner.forward

    def forward(*arguments: Any) -> torch.Tensor:
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pidfd)
        return original(*arguments)

    monkeypatch.setattr(runner, "forward", forward)
    with pytest.raises(EngineDead, match="SIGKILL"):
        run(worker, [Chunk([1, 2], 0, 2, [3])])
    worker.close()


@pytest.mark.slow
def test_a_rank_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells of it but the step, and closing ends it all the same."""
    monkeypatch.setattr(group_module, "STEP_SECONDS", 0.5)
    monkeypatch.setattr(group_module, "END_SECONDS", 0.5)
    worker = load_worker(make_config(folder, 2))
    assert isinstance(worker, GroupWorker)
    (pid,) = worker.group.pids
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDead, match=rf"A step has not ended within 0\.5 seconds: a rank hangs .*{pid}"):
        run(worker, [Chunk([1, 2], 0, 2, [3])])
    worker.close()
    assert is_gone(pidfd)


def test_who_waits_for_a_lost_rank_on_a_gpu_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's kernels don't notice that another process has ended."""
    aborted: list[bool] = []
    monkeypatch.setattr(group_module, "connect", lambda *_, **__: SimpleNamespace(abort=lambda: aborted.append(True)))
    group = group_module.RankGroup(EngineConfig(model=ModelSource(path="none")), 1)
    group.meet()
    assert not aborted
    group.lose("It is gone.")
    group.lose("Once more.")
    assert aborted == [True] and group.lost.result() == "It is gone."
    group.close()


@pytest.mark.slow
def test_a_rank_that_missed_a_plan_says_so(folder: Path) -> None:
    worker = load_worker(make_config(folder, 2))
    assert isinstance(worker, GroupWorker)
    worker._num_sent = 5
    with pytest.raises(EngineDead, match="Rank 1 of 2 can't go on: RuntimeError: plan 5 came where plan 0 should have"):
        run(worker, [Chunk([1, 2], 0, 2, [3])])
    worker.close()


@pytest.mark.slow
def test_closing_ends_the_others(folder: Path) -> None:
    worker = load_worker(make_config(folder, 2))
    assert isinstance(worker, GroupWorker)
    pidfds = [os.pidfd_open(pid) for pid in worker.group.pids]
    worker.close()
    assert all(map(is_gone, pidfds)) and not worker.group.lost.done(), "that is no accident"


SCRIPT = """
import sys
from trunkline import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, threads=1, num_pages=40)
print(*llm.engine.worker.group.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_rank_0(folder: Path, number: signal.Signals, tmp_path: Path) -> None:
    """Whose process has no chance to say goodbye."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    ) as process:
        assert process.stdout is not None
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(PATIENCE) != 0
        assert is_gone(pidfd)
    assert list(tmp_path.iterdir()) == []


# Refusals.


def test_heads_that_do_not_divide_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "RankGroup", None)
    shape = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 8, "intermediate_size": 96}  # as SmolLM2-135M's heads
    config = make_config(tiny_model(tmp_path / "smol", **shape), 2)
    with pytest.raises(ConfigError, match=r"tensor-parallel-size is 2, but 9 query heads, 3 key-value heads.*are 1, 3"):
        load_worker(config)


def test_no_disk_tier(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--disk-cache-dir is given, but with --tensor-parallel-size 2 no process holds"
    ):
        load_worker(make_config(folder, 2, disk_cache_dir=str(tmp_path)))
    with pytest.raises(
        ConfigError, match="--disk-cache-dir is given, but with --tensor-parallel-size 2 no process holds"
    ):
        engine_config(folder, tensor_parallel_size=2, disk_cache_dir=str(tmp_path))


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_no_such_size(folder: Path, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size is .*; allowed is an integer of at least 1"):
        engine_config(folder, tensor_parallel_size=size)


def test_a_gpu_for_each_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(WorkerConfig(device="auto", tensor_parallel_size=2), 1) == torch.device("cuda", 1)
    assert device_of(WorkerConfig(device="cpu", tensor_parallel_size=4), 3) == torch.device("cpu")
    monkeypatch.setattr(group_module, "RankGroup", None)
    with pytest.raises(
        ConfigError, match="--tensor-parallel-size is 4, but of GPUs there are 2, and each rank takes one"
    ):
        load_worker(engine_config(folder, tensor_parallel_size=4))


def test_a_rank_that_never_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match=r"Rank 1 of 2 \(process \d+\) has ended, with exit code 1\."):
        load_worker(make_config(folder, 2))


@pytest.mark.slow
def test_a_rank_that_cannot_load_its_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is told to read another model than the others: they find out, and it is a sentence."""
    original = worker_module.load_part

    def other_part(config: EngineConfig, *rest: Any, **named: Any) -> Any:
        return original(make_config(folder, 2, block_size=32), *rest, **named)

    monkeypatch.setattr(group_module, "load_part", other_part)
    with pytest.raises(StartupError, match=r"Rank 1 of 2 .*another version, configuration or checkpoint than rank 0"):
        load_worker(make_config(folder, 2))


# The whole engine.


@pytest.mark.slow
def test_texts_with_a_host_tier_are_those_of_one_rank(folder: Path) -> None:
    """More prompts than the cache holds, twice: the second time their pages come from host memory."""
    prompts = [np.random.default_rng(seed).integers(0, 250, 100).tolist() for seed in range(8)]
    texts = []
    for size in (1, 2):
        llm = LLM(folder, dtype="float32", threads=1, num_pages=35, host_cache_memory=2**20, tensor_parallel_size=size)
        for _ in range(2):
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
        hits = llm.engine.stats()["prefix_cache_hits_total"]
        assert hits["host"] > 100, hits
        llm.close()
    assert texts == [texts[0]] * 4


@pytest.mark.real
@pytest.mark.slow
def test_the_built_in_model_on_three_ranks() -> None:
    """24 prompts: each token is that of one rank, except at ties."""
    need_compiler()
    generator = np.random.default_rng(1)
    prompts = [generator.integers(300, 40_000, length).tolist() for length in range(4, 52, 2)]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    for size in (1, 3):
        llm = LLM(dtype="float32", num_pages=400, max_model_len=512, tensor_parallel_size=size)
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
        llm.close()
    reference = load_reference(builtin_model())
    for prompt, one, three in zip(prompts, *texts, strict=True):
        if one != three:
            at = next(at for at, tokens in enumerate(zip(one, three, strict=True)) if tokens[0] != tokens[1])
            gaps = greedy_gaps(reference, prompt, three[: at + 1])
            assert gaps[-1][1] < 1e-3, (at, gaps)

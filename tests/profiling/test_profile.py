"""A profile's parts add up to its steps, and every part is given what it must read and compute. On a clock that ticks, without a model."""

import argparse
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.scheduler.factories import make_engine
from tests.stub import VOCAB_SIZE, StubWorker
from tests.tiny import tiny_model
from trunkline.bench.steps import WARM_UPS
from trunkline.config import ModelSource
from trunkline.errors import ConfigError
from trunkline.kernels.interface import PackedLinear
from trunkline.kernels.limits import Limits
from trunkline.kernels.quantized import IntegerFormat, Offsets
from trunkline.kernels.reference import ReferenceKernels
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.config import ModelConfig
from trunkline.models.layers import Loader
from trunkline.models.registry import make_model
from trunkline.profiling import command
from trunkline.profiling import profile as profiles
from trunkline.profiling import profiler as profilers
from trunkline.profiling.profile import Part, StepProfile, TimedStep, Work, packed_matrices, with_best_limits
from trunkline.profiling.profiler import Profiler
from trunkline.profiling.report import numbers, report
from trunkline.step import LogitsRow, Plan, SharedRun, StepMarks, StepResult

CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
)
TIMES = {"linear 8 -> 16": (2, 0.25), "linear 8 -> 97": (1, 0.125), "attention": (2, 0.5), "norm": (5, 0.0625)}


class Clock:
    """A second passes between two looks at it."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        return float(next(self._ticks))


def matrix(n: int, k: int) -> PackedLinear:
    return PackedLinear(torch.zeros(n, k), n=n, k=k)


MATRICES = [matrix(16, 8), matrix(16, 8), matrix(VOCAB_SIZE, 8)]


class MarkedWorker(StubWorker):
    """A StubWorker that tells its marks, with kernels that tell their times."""

    def __init__(self, clock: Clock, *, kernels: Any, **facts: Any) -> None:
        super().__init__(**facts)
        self.clock = clock
        self.runner = SimpleNamespace(kernels=kernels, config=CONFIG, model=MATRICES)

    def wait(self, handle: int) -> StepResult:
        begun = self.clock()
        result = super().wait(handle)
        marks = StepMarks(begun, self.clock(), self.clock(), self.clock())
        return StepResult(step=result.step, token_ids=result.token_ids, logprobs=result.logprobs, marks=marks)


class TimedKernels:
    def __init__(self) -> None:
        self.profiling = False

    def start_profile(self) -> None:
        assert not self.profiling
        self.profiling = True

    def stop_profile(self) -> dict[str, tuple[int, float]]:
        assert self.profiling
        self.profiling = False
        return TIMES


def make_profiler(*, kernels: Any = None, num_pages: int = 256, **scheduler: Any) -> tuple[Profiler, MarkedWorker]:
    clock = Clock()
    engine = make_engine(num_pages=num_pages, max_model_len=256, num_speculative_tokens=0, **scheduler)
    worker = MarkedWorker(clock, kernels=kernels or TimedKernels(), num_pages=num_pages)
    engine.worker = worker
    return Profiler(engine, worker, None, max_model_len=256, clock=clock), worker


def test_parts_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TimedStep] = []
    middle_half = profiles.middle_half

    def look(steps: Any) -> Any:
        seen.extend(steps)
        return middle_half(steps)

    monkeypatch.setattr(profilers, "middle_half", look)
    profiler, worker = make_profiler()
    with profiler:
        found = profiler.decode(batch=3, context=40, steps=4)
    assert found is not None and len(seen) == 4 and found.fastest == found.seconds
    assert {step.seconds for step in seen} == {found.seconds}
    by_name = {(part.group, part.name): part.seconds for part in found.parts}
    assert by_name["scheduling", "planning"] == by_name["scheduling", "applying the result"] == 1
    assert (
        by_name["IPC", "threads' hand-over"] == 1 + 1 + 1 + 1
    )  # to begun: handed, waiting, begun; from done: received
    assert by_name["masks", "waited for"] == by_name["sampling", ""] == by_name["IPC", "messages are sent"] == 1
    assert by_name["around the kernels", ""] == 1 - sum(seconds for _, seconds in TIMES.values())
    assert found.beside == {"masks are filled": 1, "messages are read": 1}
    assert [part.group for part in found.parts] == sorted(
        (part.group for part in found.parts), key=profiles.GROUPS.index
    ), "as a report shows them"
    plans = worker.plans[-1]
    assert (plans.num_tokens, plans.num_requests, found.requests, found.tokens) == (3, 3, 3, 3)


def test_contexts_are_about_what_was_asked_for() -> None:
    profiler, worker = make_profiler()
    with profiler:
        profiler.decode(batch=2, context=40, steps=10)
    lengths = [plan.context_len.tolist() for plan in worker.plans if plan.num_tokens == 2]
    assert len(lengths) == WARM_UPS + 10
    assert abs(np.mean(lengths[WARM_UPS:]) - 40) <= 2


def test_a_prompt_is_read_in_one_step() -> None:
    profiler, worker = make_profiler(max_num_batched_tokens=64)
    with profiler:
        found = profiler.prefill(tokens=50, steps=3)
    assert found is not None and (found.requests, found.tokens) == (1, 50)
    assert [plan.num_tokens for plan in worker.plans] == [50] * (WARM_UPS + 3), "nothing of a prompt is cached"
    assert found.kv_bytes == 50 * 4  # a token of the stub's is 4 bytes


def test_the_engine_is_left_as_it_was() -> None:
    profiler, worker = make_profiler()
    engine = profiler._engine
    with profiler:
        profiler.decode(batch=3, context=40, steps=4)
    assert engine.worker is worker and not engine.has_work and not worker.runner.kernels.profiling
    engine.scheduler.check()


def test_kernels_without_times_stay_whole() -> None:
    profiler, _ = make_profiler(kernels=SimpleNamespace())
    with profiler:
        found = profiler.decode(batch=1, context=40, steps=2)
    assert found is not None
    assert [part.group for part in found.parts][:2] == ["model (not taken apart)", "sampling"]
    assert found.weight_bytes == sum(4 * one.n * one.k for one in MATRICES)


def test_what_cannot_be_profiled() -> None:
    profiler, worker = make_profiler(num_pages=20, max_num_seqs=4, max_num_batched_tokens=32)
    with profiler:
        assert profiler.decode(batch=4, context=40, steps=2) is None and not worker.plans
        with pytest.raises(ConfigError, match="A batch of 5 is more than --max-num-seqs, 4"):
            profiler.decode(batch=5, context=40, steps=2)
        with pytest.raises(ConfigError, match=r"A context of 250 tokens, and .* more, is over the model's 256"):
            profiler.decode(batch=1, context=250, steps=20)
        with pytest.raises(ConfigError, match="A chunk of 33 tokens is more than --max-num-batched-tokens, 32"):
            profiler.prefill(tokens=33, steps=2)
        with pytest.raises(ConfigError, match="A chunk of 256 tokens and one more is over the model's 256"):
            profiler.prefill(tokens=256, steps=2)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"batches": [1, 5]}, "A batch of 5 is more than --max-num-seqs, 4; raise that."),
        ({"contexts": [40, 250]}, "A context of 250 tokens, and "),
        ({"chunks": [32, 33]}, "A chunk of 33 tokens is more than --max-num-batched-tokens, 32"),
        ({"chunks": [32, 256]}, "A chunk of 256 tokens and one more is over the model's 256"),
    ],
)
def test_the_last_of_some_sizes_is_checked_before_the_first_is_profiled(
    sizes: dict[str, list[int]], words: str
) -> None:
    profiler, worker = make_profiler(max_num_seqs=4, max_num_batched_tokens=32)
    asked: dict[str, Any] = {"batches": [1, 4], "contexts": [40], "chunks": [32], "steps": 2}
    with profiler:
        profiler.check(**asked)
        with pytest.raises(ConfigError, match=words):
            profiler.check(**asked | sizes)
    assert not worker.plans


def test_an_output_that_cannot_be_written_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(output: Path) -> None:
        command.check(argparse.Namespace(output=output, profile=False))

    check(tmp_path / "new.json")
    with pytest.raises(ConfigError, match="which is a folder; name a file in it"):
        check(tmp_path)
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))  # root may write everything
    (tmp_path / "old.json").touch()
    for name in ("new.json", "old.json"):
        with pytest.raises(ConfigError, match=f"{name}, which may not be written; name another file"):
            check(tmp_path / name)
    assert asked == [(tmp_path, os.W_OK), (tmp_path / "old.json", os.W_OK)]


def test_other_workers_are_refused() -> None:
    llm: Any = SimpleNamespace(engine=make_engine())
    with pytest.raises(ConfigError, match="--profile takes steps apart that run on the CPU in one process"):
        command.run(argparse.Namespace(), llm)


# ---------------------------------------------------------------- what a step has to do


def make_plan(positions: list[int], contexts: list[int], shared: tuple[SharedRun, ...] = ()) -> Plan:
    """Decode, or the last rows of one request."""
    starts = np.arange(len(contexts) + 1) if len(contexts) == len(positions) else np.array([0, len(positions)])
    row = LogitsRow(request=0, at=len(positions) - 1, position=positions[-1] + 1, sampling=None)
    return Plan(
        step=1,
        token_ids=np.zeros(len(positions), np.int32),
        positions=np.array(positions, np.int32),
        query_start=starts.astype(np.int32),
        context_len=np.array(contexts, np.int32),
        page_table=np.zeros((len(contexts), 1), np.int32),
        rows=(row,) * len(contexts),
        shared=shared,
    )


def test_what_a_decode_step_reads_and_computes() -> None:
    work, plan = Work(CONFIG, MATRICES, kv_token_bytes=32), make_plan([9, 19], [10, 20])
    assert work.weight_bytes() == 4 * (2 * 16 * 8 + VOCAB_SIZE * 8)
    assert work.kv_bytes(plan) == 30 * 32
    layers, head = work.linear("linear 8 -> 16", 2, 1.0, plan), work.linear("linear 8 -> 97", 1, 1.0, plan)
    assert layers is not None and head is not None
    assert (layers.num_bytes, layers.operations) == (4 * 2 * 16 * 8, 2 * 2 * 2 * 16 * 8)
    assert (head.num_bytes, head.operations) == (4 * VOCAB_SIZE * 8, 2 * 2 * VOCAB_SIZE * 8)
    # q · k and p · v: 2 heads of 4, two operations a product, 2 layers
    assert work.attention(1.0, plan).operations == (10 + 20) * 2 * 2 * 2 * 4 * 2
    assert work.sampling(1.0, plan).num_bytes == 2 * VOCAB_SIZE * 4
    assert work.linear("norm", 1, 1.0, plan) is None


def test_what_a_chunk_computes() -> None:
    work, plan = Work(CONFIG, MATRICES, kv_token_bytes=32), make_plan([4, 5, 6], [7])
    layers, head = work.linear("linear 8 -> 16", 2, 1.0, plan), work.linear("linear 8 -> 97", 1, 1.0, plan)
    assert layers is not None and layers.operations == 3 * 2 * 2 * 16 * 8
    assert head is not None and head.operations == 2 * VOCAB_SIZE * 8, "of the row that is wanted"
    assert work.kv_bytes(plan) == 7 * 32
    assert work.attention(1.0, plan).operations == (5 + 6 + 7) * 2 * 2 * 2 * 4 * 2


def test_what_is_shared_is_read_once() -> None:
    run = SharedRun(np.array([0, 1], np.int32), 0, 512)
    plan = make_plan([599, 519], [600, 520], (run,))
    assert Work(CONFIG, MATRICES, kv_token_bytes=1).kv_bytes(plan) == 600 + 520 - 512


def test_packed_weights_are_multiplied_as_integers() -> None:
    integers = IntegerFormat(bits=8, group=8, scale_dtype=torch.float32, offsets=Offsets.NONE)
    packed = PackedLinear(torch.zeros(16, 8, dtype=torch.int8), n=16, k=8, integers=integers)
    work, plan = Work(CONFIG, [packed], kv_token_bytes=1), make_plan([9], [10])
    part = work.linear("linear_quantized 8 -> 16", 2, 1.0, plan)
    assert part is not None and part.arithmetic == "int16" and part.num_bytes == 2 * 16 * 8


def test_a_layer_that_is_wider_than_the_vocabulary_is_no_head() -> None:
    wide = [matrix(VOCAB_SIZE + 1, 8)] * 3
    work, plan = Work(CONFIG, [*wide, matrix(VOCAB_SIZE, 8)], kv_token_bytes=1), make_plan([9, 9], [20])
    assert work.weight_bytes() == 4 * 8 * (3 * (VOCAB_SIZE + 1) + VOCAB_SIZE)
    part = work.linear(f"linear 8 -> {VOCAB_SIZE + 1}", 3, 1.0, plan)
    assert part is not None and part.operations == 2.0 * 8 * (VOCAB_SIZE + 1) * plan.num_tokens * 3


@pytest.mark.parametrize("tie", [True, False])
def test_the_matrices_of_a_model(tie: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = open_checkpoint(ModelSource(path=str(tiny_model(tmp_path_factory.mktemp("tiny") / "m", tie=tie))))
    model = make_model(checkpoint.config, Loader(checkpoint.tensors(), ReferenceKernels(), torch.float32))
    found = list(packed_matrices(model))
    config = checkpoint.config
    assert len(found) == 4 * config.num_layers + (1 if tie else 2)
    inputs = sum(one.n * one.k for one in found if one.n != config.vocab_size)
    weight_bytes = Work(config, found, 1).weight_bytes()
    assert weight_bytes == 4 * (inputs + config.vocab_size * config.hidden_size), "one of the vocabulary is read"


def test_limits_are_the_best_that_were_seen() -> None:
    def profile(num_bytes: float, read: float, float32: float) -> StepProfile:
        limits = Limits(read_rate=read, multiply_rates={"float32": float32, "int16": 1.0})
        return make_profile(weight_bytes=num_bytes, kv_bytes=0.0, limits=limits)

    found = with_best_limits([profile(10, 5.0, 2.0), profile(20, 7.0, 3.0), profile(30, 6.0, 1.0)], 4.0)
    assert [one.limits.read_rate for one in found if one.limits is not None] == [7.0, 7.0, 6.0]
    assert [one.limits.multiply_rates["float32"] for one in found if one.limits is not None] == [3.0, 3.0, 3.0]
    assert with_best_limits([make_profile(limits=None)], 0.0)[0].limits is None
    (best,) = with_best_limits([profile(10, 5.0, 2.0)], memory_rate=8.0)
    assert best.limits is not None and best.limits.read_rate == best.memory_rate == 8.0


# ---------------------------------------------------------------- the report


def make_profile(**changes: Any) -> StepProfile:
    parts = (
        Part("matmuls", "8 → 16 ×2", 0.004, num_bytes=60e6, operations=2e9, arithmetic="int16"),
        Part("matmuls", "8 → 97 ×1", 0.002, num_bytes=30e6, operations=1e9, arithmetic="int16"),
        Part("attention", "", 0.003, num_bytes=10e6, operations=1e9),
        Part("scheduling", "planning", 0.001),
    )
    limits = Limits(read_rate=20e9, multiply_rates={"float32": 500e9, "int16": 1000e9})
    facts: dict[str, Any] = {
        "requests": 8,
        "tokens": 8,
        "context": 512,
        "constrained": False,
        "parts": parts,
        "fastest": 0.008,
    }
    facts |= {"beside": {"masks are filled": 0.0005}, "weight_bytes": 90e6, "kv_bytes": 10e6, "limits": limits}
    return StepProfile(**(facts | changes))


def cells(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_report_says_what_is_reached() -> None:
    text = report(make_profile())
    assert text.startswith("Decode: 8 requests at context 512. 10.00 ms a step, 800 tokens/s")
    assert cells(text, "matmuls") == ["6.00", "60 %", "90.0", "15.0", "75 %", "3.00", "500", "50 %"]
    assert cells(text, "· 8 → 97 ×1") == ["2.00", "20 %", "30.0", "15.0", "75 %", "1.00", "500", "50 %"]
    assert cells(text, "attention") == ["3.00", "30 %", "10.0", "3.3", "17 %", "1.00", "333", "67 %"]
    assert cells(text, "scheduling") == ["1.00", "10 %", "", "", "", "", "", ""]
    assert cells(text, "a step")[:2] == ["10.00", "100 %"]
    assert "Reading 90.0 MB of weights and 10.0 MB of keys and values takes 5.00 ms (20.0 GB/s)." in text
    assert "Multiplying takes 5.00 ms" in text, "3e9 at 1e12, and 1e9 at 500e9"
    assert "bound is reading, 5.00 ms: the step reaches 50 % of it, the fastest, of 8.00 ms, 62 %." in text
    assert "memory alone (10.0 GB/s) it would be 10.00 ms: the step reaches 100 %" in report(
        make_profile(memory_rate=1e10)
    )
    assert max(map(len, text.splitlines())) <= 120
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) <= 100


def test_a_report_without_limits() -> None:
    text = report(make_profile(limits=None, tokens=512, requests=1, context=512))
    assert text.startswith("Prefill: a prompt of 512 tokens. 10.00 ms a step")
    assert cells(text, "matmuls") == ["6.00", "60 %", "90.0", "15.0", "", "3.00", "500", ""]
    assert "The machine's limits were not measured" in text


def test_numbers_for_programs() -> None:
    told = numbers(make_profile())
    assert told["seconds"] == pytest.approx(sum(part["seconds"] for part in told["parts"]))
    assert told["bound"] == {"reading": pytest.approx(0.005), "multiplying": pytest.approx(0.005)}
    assert told["reached"] == pytest.approx(0.5) and told["limits"]["read_rate"] == 20e9
    assert "reached" not in numbers(make_profile(limits=None))

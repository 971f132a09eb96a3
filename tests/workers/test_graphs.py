"""CUDA graphs without a GPU: which steps take one, how they are padded, and that a replay is the step run eagerly."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.fake_device import (
    VOCAB_SIZE,
    FakeDevice,
    FakeGraph,
    Frozen,
    HashKernels,
    HashModel,
    next_token,
)
from tests.workers.plans import Chunk, make_plan
from trunkline.step import Plan
from trunkline.workers.gpu_runner import GpuRunner, Room
from trunkline.workers.graphs import LAZY_AFTER, DecodeGraphs, common_sizes, is_decode, rare_sizes

PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN, REQUESTS = 4, 40, 32, 12


class Bench:
    """A runner on a fake device; `forward` runs a plan to its end."""

    def __init__(self, *, graphs: bool = True, requests: int = REQUESTS) -> None:
        self.device = FakeDevice()
        room = Room(requests=requests, rows=128, max_model_len=MAX_MODEL_LEN)
        kernels: Any = HashKernels()
        self.runner = GpuRunner(HashModel(), kernels, torch.float32, self.device, room)
        self.runner.allocate(NUM_PAGES, PAGE_SIZE)
        if graphs:
            self.runner.capture()

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.device.captured)

    def forward(self, plan: Plan, num_chosen: int = 0) -> torch.Tensor:
        run = self.runner.prepare(plan, self.runner.check(plan, num_chosen))
        logits: list[torch.Tensor] = []
        self.device.launch(lambda: logits.append(run()))
        self.device.synchronize()
        return logits[0].clone()

    def poison(self) -> None:
        """What steps before have left in static memory."""
        runner = self.runner
        runner._tables.fill_(NUM_PAGES - 1)
        runner._logits.fill_(torch.nan)
        for inputs in (runner._decode_inputs, runner._eager_inputs):
            inputs._buffer.fill_(-1)
            for staging in inputs._staging:
                staging.fill_(-1)


def tokens(num: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num).tolist()


def decode_chunks(count: int, seed: int = 0) -> tuple[list[Chunk], list[Chunk]]:
    """Prompts of `count` requests, each with pages of its own, and the token that follows each prompt."""
    lengths = np.random.default_rng(seed).integers(1, 9, count)
    prompts, decodes = [], []
    for index, length in enumerate(lengths.tolist()):
        known, pages = tokens(length + 1, seed + index), list(range(3 * index, 3 * index + 3))
        prompts.append(Chunk(known, 0, length, pages))
        decodes.append(Chunk(known, length, length + 1, pages))
    return prompts, decodes


def test_sizes():
    assert common_sizes(256) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert common_sizes(12) == [1, 2, 4, 8, 12]
    assert common_sizes(1) == [1]
    assert rare_sizes(256) == [24, 48, 96, 192]
    assert rare_sizes(24) == []


def test_the_largest_is_captured_first_and_progress_is_told():
    captured, seen = [], []
    graphs = DecodeGraphs(FakeDevice(), 5, lambda size: captured.append(size) or (lambda: None))
    graphs.capture_common(lambda done, total: seen.append((done, total)))
    assert captured == [5, 4, 2, 1]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)] and len(graphs) == 4


def test_a_graphs_kernels_have_run_before_it_is_captured():
    runs = []
    DecodeGraphs(FakeDevice(), 1, lambda size: lambda: runs.append(size)).capture(1)
    assert runs == [1, 1]


def test_a_step_takes_the_smallest_graph_that_holds_it():
    graphs = DecodeGraphs(FakeDevice(), 64, lambda size: lambda: None)
    assert graphs.size_for(1) is None, "nothing is captured yet"
    graphs.capture_common()
    assert [graphs.size_for(num) for num in (1, 2, 3, 33, 64, 65)] == [1, 2, 4, 64, 64, None]


def test_a_rare_size_is_captured_when_it_is_wanted_again_and_again():
    graphs = DecodeGraphs(FakeDevice(), 64, lambda size: lambda: None)
    graphs.capture_common()
    assert {graphs.size_for(40) for _ in range(LAZY_AFTER - 1)} == {64}
    assert graphs.size_for(40) == 48 and len(graphs) == 8
    assert graphs.size_for(49) == 64


def test_without_memory_for_a_rare_graph_the_next_larger_one_serves(monkeypatch, caplog):
    device = FakeDevice()
    graphs = DecodeGraphs(device, 64, lambda size: lambda: None)
    graphs.capture_common()

    def run_out(*arguments):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(device, "capture", run_out)
    sizes = [graphs.size_for(20) for _ in range(2 * LAZY_AFTER)]
    assert set(sizes) == {32}
    assert caplog.text.count("no memory for that graph: tried to allocate") == 1


def test_without_capture_no_step_takes_a_graph():
    bench = Bench(graphs=False)
    prompts, decodes = decode_chunks(2)
    bench.forward(make_plan(prompts))
    bench.forward(make_plan(decodes))
    assert not bench.device.captured


# Which steps take one.


def test_only_pure_decoding_takes_a_graph():
    prompts, decodes = decode_chunks(3)
    assert is_decode(make_plan(decodes))
    assert not is_decode(make_plan([prompts[0]._replace(last=prompts[0].last), *decodes[1:]])) or prompts[0].last == 1
    assert not is_decode(make_plan([Chunk(tokens(9), 7, 9, [1, 2, 3]), *decodes])), "a draft to verify"
    mixed = make_plan(decodes)
    assert not is_decode(replace(mixed, rows=mixed.rows[1:])), "a chunk of one token whose logits nobody wants"


def test_mixed_steps_run_eagerly_and_leave_the_graphs_as_they_were():
    bench, plain = Bench(), Bench(graphs=False)
    prompts, decodes = decode_chunks(4)
    new = Chunk(tokens(10, 9), 0, 10, [30, 31, 32])
    for plan in (make_plan(prompts), make_plan([*decodes, new])):
        assert torch.equal(bench.forward(plan), plain.forward(plan))
    assert bench.replays == 0
    more = make_plan([Chunk([*new.token_ids, 5], 10, 11, new.pages)])
    assert torch.equal(bench.forward(more), plain.forward(more)) and bench.replays == 1


# That a replay is the step.


@pytest.mark.parametrize("count", range(1, REQUESTS + 1))
def test_a_replay_equals_the_eager_step_whatever_was_there_before(count):
    """For every batch size of every bucket, on memory poisoned with -1 and NaN."""
    bench, plain = Bench(), Bench(graphs=False)
    prompts, decodes = decode_chunks(count)
    for runner in (bench, plain):
        runner.forward(make_plan(prompts))
    bench.poison()
    plan = make_plan(decodes)
    logits = bench.forward(plan)
    assert bench.replays == 1
    assert torch.equal(logits, plain.forward(plan))
    assert logits.argmax(1).tolist() == [next_token(chunk.token_ids[: chunk.last]) for chunk in decodes]
    kv = bench.runner._kv
    assert torch.equal(kv.keys[:, :NUM_PAGES].nan_to_num(-7), plain.runner._kv.keys[:, :NUM_PAGES].nan_to_num(-7)), (
        "padded rows write nowhere"
    )


@given(st.lists(st.tuples(st.integers(1, REQUESTS), st.booleans()), min_size=1, max_size=8), st.integers(0, 99))
@settings(max_examples=20)
def test_steps_of_all_sizes_one_after_the_other(steps, seed):
    """Stale rows of a larger step before, wide page tables and narrow ones: all give what the eager step gives."""
    bench, plain = BENCH, PLAIN
    for number, (count, is_prompt) in enumerate(steps):
        prompts, decodes = decode_chunks(count, seed + number)
        for plan in (make_plan(prompts), *([] if is_prompt else [make_plan(decodes)])):
            assert torch.equal(bench.forward(plan), plain.forward(plan))


BENCH, PLAIN = Bench(), Bench(graphs=False)


def test_tokens_in_flight_are_looked_up_on_the_device():
    bench = Bench()
    prompts, decodes = decode_chunks(3)
    bench.forward(make_plan(prompts))
    bench.runner.chosen[:3] = torch.tensor([chunk.token_ids[-1] for chunk in reversed(decodes)])
    plan = make_plan(decodes)
    assert torch.equal(
        bench.forward(replace(plan, token_ids=np.array([-3, -2, -1], np.int32)), num_chosen=3),
        Bench.forward(bench, plan),
    )
    bench.runner.chosen[:3] = -1
    zeros = bench.forward(replace(plan, token_ids=np.zeros(3, np.int32)))
    assert torch.equal(bench.forward(replace(plan, token_ids=np.array([-3, -2, -1], np.int32)), num_chosen=3), zeros)


def test_beside_the_graph_a_decode_step_allocates_nothing_on_the_device():
    bench = Bench()
    prompts, decodes = decode_chunks(3)
    bench.forward(make_plan(prompts))
    plan = make_plan(decodes)
    run = bench.runner.prepare(plan, bench.runner.check(plan, 0))
    bench.device.synchronize()
    for graph in bench.device.captured:
        graph.replay = lambda: None
    with Frozen():
        run()


# That the fake would notice.


def test_the_fake_notices_what_a_graph_could_not_follow():
    static = torch.arange(4.0)
    with pytest.raises(AssertionError, match="waits for the device"):
        FakeGraph(lambda: static.sum().item())
    with pytest.raises(AssertionError, match="waits for the device"):
        FakeGraph(lambda: static[static > 1])
    graph = FakeGraph(lambda: static.add_(torch.ones(4)))
    graph.replay()
    assert static.tolist() == [2, 3, 4, 5]
    inputs = [torch.ones(4)]
    graph = FakeGraph(lambda: static.add_(inputs[0]))
    inputs[0] = torch.zeros(4)
    with pytest.raises(AssertionError, match="was given back"):
        graph.replay()


def test_an_input_that_moved_is_noticed():
    bench = Bench()
    _, decodes = decode_chunks(2)
    bench.runner._decode_inputs._grow(2**12)
    plan = make_plan(decodes)
    with pytest.raises(AssertionError, match="has moved"):
        bench.runner.prepare(plan, bench.runner.check(plan, 0))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"token_ids": [VOCAB_SIZE, 1]}, "vocabulary is 97"),
        ({"token_ids": [1, -4]}, "had 3 rows of logits"),
        ({"page_table": [[NUM_PAGES], [0]]}, "there are 40"),
        (
            {"positions": [40, 0], "context_len": [41, 1], "page_table": [[1] * 11, [2] * 11]},
            "there is room for 128 and 32",
        ),
    ],
)
def test_a_plan_that_leads_outside_is_refused(change, told):
    bench = Bench()
    plan = make_plan([Chunk([5], 0, 1, [0]), Chunk([6], 0, 1, [1])])
    with pytest.raises(ValueError, match=told):
        bench.runner.check(
            replace(plan, **{name: np.array(value, np.int32) for name, value in change.items()}), num_chosen=3
        )

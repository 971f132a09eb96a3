"""Programs: run from C, they do what their body does, whatever the batch; and they notice when something has moved."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.factories import TARGETS, Heads, Requests, compiled, random
from tests.kernels.matrices import STORED, make_matrix
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import Batch, KvPages
from trunkline.step import SPLIT, SharedRun

HEADS = Heads(query=6, kv=2, dim=16)
HIDDEN = HEADS.query * HEADS.dim
MOST_ROWS = 64


class Layer:
    """Every operation that a decoder's layer is made of, over buffers that never move. `calls` of `body` are counted."""

    def __init__(self, kernels: CpuKernels, kv: KvPages, rope: Tensor) -> None:
        self.kernels, self.kv, self.rope, self.calls = kernels, kv, rope, 0
        self.norm = random(HIDDEN, seed=1).abs()
        self.qkv_weight = kernels.pack_linear([random(HEADS.width, HIDDEN, seed=2, std=0.1)], torch.float16)
        integers = make_matrix(2 * HIDDEN, HIDDEN, group=32, bits=4, offsets=STORED, half=True)
        self.gate_weight, self.bias = kernels.pack_linear([integers], torch.float16), random(2 * HIDDEN, seed=3)
        self.q_norm, self.k_norm = random(HEADS.dim, seed=4), random(HEADS.dim, seed=5)
        self.make_buffers()
        self.program = kernels.new_program()

    def make_buffers(self) -> None:
        self.hidden, self.branch, self.normed, self.attended = (torch.zeros(MOST_ROWS, HIDDEN) for _ in range(4))
        self.qkv, self.gate = torch.zeros(MOST_ROWS, HEADS.width), torch.zeros(MOST_ROWS, 2 * HIDDEN)

    def body(self, batch: Batch) -> Callable[[], None]:
        rows = len(batch.positions)
        hidden, branch, normed = self.hidden[:rows], self.branch[:rows], self.normed[:rows]
        qkv, attended, gate = self.qkv[:rows], self.attended[:rows], self.gate[:rows]

        def run() -> None:
            self.calls += 1
            k = self.kernels
            k.add_rms_norm(branch, hidden, self.norm, 1e-5, out=normed)
            k.linear(normed, self.qkv_weight, out=qkv)
            k.rotate_and_store(qkv, self.rope, batch, self.kv, 1, q_norm=self.q_norm, k_norm=self.k_norm, epsilon=1e-5)
            k.attention(qkv, batch, self.kv, 1, HEADS.dim**-0.5, out=attended)
            k.linear(attended, self.gate_weight, self.bias, out=gate)
            k.gated_mul(gate, "silu", out=branch)

        return run

    def step(self, batch: Batch, x: Tensor, *, recorded: bool) -> list[Tensor]:
        """What the layer makes of `x` [T, HIDDEN]: residual stream, branch, and the pages."""
        rows = len(x)
        self.branch[:rows] = x
        self.hidden[:rows] = 0
        batch = self.kernels.prepare(batch, self.kv)
        fixed = (self.hidden, self.branch, self.normed, self.qkv, self.attended, self.gate)
        if recorded:
            self.program(self.body(batch), batch, (*fixed, self.rope, self.kv.keys, self.kv.values))
        else:
            self.body(batch)()
        return [tensor.clone() for tensor in (self.hidden[:rows], self.branch[:rows], self.kv.keys, self.kv.values)]


def make_layers(requests: Requests, kernels: CpuKernels) -> tuple[Layer, Layer]:
    """Two that are alike, with pages of their own."""

    def make() -> Layer:
        return Layer(kernels, requests.allocate(kernels, torch.float16, poison=False), requests.rope)

    return make(), make()


SHARED = [SharedRun(np.array([0, 1], np.int32), 0, SPLIT)]


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=15)
@given(data=st.data())
def test_equal_to_the_body_for_every_batch(target: str, data: st.DataObject) -> None:
    end = SPLIT + 12
    requests = Requests([end, end, 9], HEADS, shared=SHARED)
    direct, recorded = make_layers(requests, compiled(target))
    steps = [[(0, first, first + MOST_ROWS)] for first in range(0, SPLIT, MOST_ROWS)]
    steps += [[(0, SPLIT, SPLIT + 1), (1, SPLIT, SPLIT + 3), (2, 0, 4)]]
    choices = (0, end - 5, end), (0, end - 1, end), (1, end - 1, end), (1, end - 7, end - 2), (2, 2, 9)
    chunk = st.sampled_from(choices)
    steps += data.draw(st.lists(st.lists(chunk, min_size=1, max_size=3, unique_by=lambda c: c[0]), max_size=4))
    for seed, chunks in enumerate(steps):
        batch = requests.batch(chunks, grouped=True)
        x = random(len(batch.positions), HIDDEN, seed=seed)
        expected = direct.step(batch, x, recorded=False)
        for ours, theirs in zip(recorded.step(batch, x, recorded=True), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert recorded.calls == 1


def test_written_down_anew_when_a_buffer_moves() -> None:
    requests = Requests([20], HEADS)
    direct, recorded = make_layers(requests, compiled())
    for position in range(4):
        batch, x = requests.batch([(0, position, position + 1)]), random(1, HIDDEN, seed=position)
        if position == 2:
            recorded.make_buffers()
        expected = direct.step(batch, x, recorded=False)
        for ours, theirs in zip(recorded.step(batch, x, recorded=True), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert recorded.calls == 2


def test_pages_of_another_shape_in_the_same_place_are_others() -> None:
    requests = Requests([20], HEADS)
    layer, _ = make_layers(requests, compiled())
    batch = layer.kernels.prepare(requests.batch([(0, 0, 3)]), layer.kv)
    keys = layer.kv.keys
    for calls, pages in enumerate([keys, keys.flatten(2), keys.view(torch.int16), keys.flatten(0, 1)], start=1):
        for _ in range(2):
            layer.program(layer.body(batch), batch, (pages,))
        assert layer.calls == calls


def test_what_is_about_another_batch_is_not_written_down() -> None:
    requests = Requests([20, 20], HEADS)
    layer, _ = make_layers(requests, compiled())
    batch, other = (requests.batch([(request, 0, 3)]) for request in (0, 1))
    with pytest.raises(ValueError, match="where its batch has"):
        layer.program(layer.body(other), batch, (layer.hidden,))
    layer.step(batch, random(3, HIDDEN), recorded=True)  # and nothing of it is kept
    assert layer.calls == 2


def test_an_error_on_the_way_leaves_no_program() -> None:
    kernels, requests = compiled(), Requests([20], HEADS)
    layer, _ = make_layers(requests, kernels)
    batch = requests.batch([(0, 0, 3)])

    def fails() -> None:
        layer.body(batch)()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            layer.program(fails, batch, (layer.hidden,))
    layer.step(batch, random(3, HIDDEN), recorded=True)


def test_the_profile_counts_calls_of_both_kinds() -> None:
    kernels, requests = compiled(), Requests([20], HEADS)
    layer, _ = make_layers(requests, kernels)
    kernels.start_profile()
    for position in range(3):
        layer.step(requests.batch([(0, position, position + 1)]), random(1, HIDDEN), recorded=True)
    profile = kernels.stop_profile()
    assert layer.calls == 1
    assert {name: time.calls for name, time in profile.items()} == {
        "norm": 3,
        f"linear {HIDDEN} -> {HEADS.width}": 3,
        "rotate_and_store": 3,
        "attention": 3,
        f"linear_quantized {HIDDEN} -> {2 * HIDDEN}": 3,
        "gated_mul": 3,
    }
    assert all(time.seconds > 0 for time in profile.values())
    with pytest.raises(AssertionError):
        kernels.stop_profile()

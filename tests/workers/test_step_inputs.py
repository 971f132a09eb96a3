"""Packing a step's integers: what arrives, where it lies, and that nothing is overwritten before it is copied."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fake_device import FakeDevice
from trunkline.workers.step_inputs import ALIGNMENT, StepInputs, shapes


class Pair(NamedTuple):
    first: torch.Tensor
    name: str


@dataclass(frozen=True, slots=True)
class Part:
    numbers: torch.Tensor
    pair: Pair
    floats: torch.Tensor
    nothing: Any = None


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_tree_arrives_as_it_was():
    device = FakeDevice()
    floats = torch.ones(2)
    part = Part(ints(1, 2, 3).view(3, 1), Pair(ints(4), "x"), floats)
    inputs = StepInputs(device, 64)
    ids, on_device = inputs.upload((ints(7, 8), part))
    device.synchronize()
    assert ids.tolist() == [7, 8] and on_device.numbers.tolist() == [[1], [2], [3]]
    assert on_device.pair.first.tolist() == [4] and on_device.pair.name == "x"
    assert on_device.floats is floats and part.numbers.tolist() == [[1], [2], [3]]
    assert shapes((ids, part)) == [(2,), (3, 1), (1,)]


def test_what_holds_no_integers_stays_the_same_object():
    pair = (Pair(torch.ones(1), "x"), ("a", 1))
    inputs = StepInputs(FakeDevice(), 64)
    ids, same = inputs.upload((ints(1), pair))
    assert same is pair and ids.tolist() is not None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_equal_shapes_lie_at_equal_addresses_that_16_bytes_divide(lengths):
    inputs = StepInputs(FakeDevice(), 64)
    trees = [
        inputs.upload(tuple(torch.full((length,), value, dtype=torch.int32) for length in lengths)) for value in (1, 2)
    ]
    places = [[tensor.storage_offset() for tensor in tree] for tree in trees]
    assert places[0] == places[1] and not any(place % ALIGNMENT for place in places[0])
    assert trees[0][0].untyped_storage().data_ptr() == trees[1][0].untyped_storage().data_ptr()


@pytest.mark.parametrize("seed", range(5))
def test_many_uploads_before_the_device_does_anything(seed):
    """There are two pinned buffers: the third upload has to wait for the copy of the first."""
    device = FakeDevice(seed, eager=0)
    inputs, read = StepInputs(device, 8), []
    for value in range(6):
        uploaded = inputs.upload(ints(value, value))
        device.launch(lambda uploaded=uploaded: read.append(uploaded.tolist()))
    device.synchronize()
    assert read == [[value, value] for value in range(6)]


def test_room_grows_while_older_inputs_are_still_to_be_read():
    device = FakeDevice(eager=0)
    inputs, read = StepInputs(device, 4), []
    for length in (3, 50, 2, 400):
        uploaded = inputs.upload(ints(*range(length)))
        device.launch(lambda uploaded=uploaded: read.append(uploaded.tolist()))
    device.synchronize()
    assert read == [list(range(length)) for length in (3, 50, 2, 400)]

"""A step's integers on their way to the device: packed into pinned memory, copied at once, cut up again over there.

    inputs = StepInputs(device, capacity=4096)
    ids, batch, wanted = inputs.upload((ids, batch, wanted))     # the same, but on the device

What has the same shapes, in the same order, lies at the same addresses in every step, as CUDA graphs want it. Pinned
memory is there twice, so that a step can be packed while the copy of the one before it may still be under way.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from trunkline.workers.device import Device, Event

ALIGNMENT = 4  # numbers of 4 bytes: kernels are compiled for pointers that 16 bytes divide

Tree = TypeVar("Tree")  # tensors, and tuples and dataclasses of them


class StepInputs:
    """Room for the int32 tensors of a step.

    capacity   numbers of room. A step that needs more gets more, elsewhere: addresses change
    """

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._turn = 0
        self._grow(capacity)

    def upload(self, tree: Tree) -> Tree:
        """The same tuples and dataclasses, with every int32 tensor of the host replaced by a copy on the device.

        The copy is enqueued on the current stream. It is overwritten by the next upload: what reads it must be on that
        stream, too. Other values stay as they are.
        """
        tensors = list(_tensors(tree))
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
        if end > len(self._buffer):
            self._grow(2 * end)
        staging = self._next_staging()
        for tensor, offset in zip(tensors, offsets, strict=True):
            staging[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        self._device.copy(staging[:end], self._buffer[:end])
        self._copied[self._turn] = self._device.record()
        starts = iter(offsets)

        def cut(tensor: Tensor) -> Tensor:
            start = next(starts)
            return self._buffer[start : start + tensor.numel()].view(tensor.shape)

        return _replace_tensors(tree, cut)

    def _next_staging(self) -> Tensor:
        """The pinned memory that was used longer ago; the copy from it is waited for."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._staging[self._turn]

    def _grow(self, capacity: int) -> None:
        self._buffer = torch.empty(capacity, dtype=torch.int32, device=self._device.torch_device)
        self._staging = [self._device.pinned((capacity,), torch.int32) for _ in range(2)]
        self._copied: list[Event | None] = [None, None]


def shapes(tree: Any) -> list[torch.Size]:
    """Of the tensors that `upload` replaces, in order."""
    return [tensor.shape for tensor in _tensors(tree)]


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Those that are to be uploaded, in order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _replace_tensors(tree, collect)
    return iter(found)


def _replace_tensors(tree: Tree, new: Callable[[Tensor], Tensor]) -> Tree:
    """What holds no such tensor stays the very object that it is."""
    value: Any = tree
    if isinstance(value, Tensor):
        value = new(value) if value.dtype == torch.int32 and value.device.type == "cpu" else value
    elif isinstance(value, tuple):
        items = [_replace_tensors(item, new) for item in value]
        if any(after is not before for after, before in zip(items, value, strict=True)):
            value = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in fields(value)}
        after = {name: _replace_tensors(item, new) for name, item in before.items()}
        changed = {name: item for name, item in after.items() if item is not before[name]}
        value = replace(value, **changed) if changed else value
    result: Tree = value
    return result

"""A step's operations as one call: written down the first time, run from C afterwards.

    program = kernels.new_program()
    program(body, batch, fixed)      # the first time: body(), and what it called is written down
    program(body, batch, fixed)      # the same with another batch, of any number of rows: one call

A model of 30 layers makes some 270 calls a step. Each costs 4 µs of the interpreter, with a core idle meanwhile: a seventh of the
step of one request whose weights are packed into 4 bits. It is to the CPU kernels what a CUDA graph is to a GPU's, but for one
difference: a graph is captured for one number of rows, and here that number is a variable.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.interface import Batch

if TYPE_CHECKING:
    from trunkline.kernels.cpu import CpuKernels

MAX_ARGUMENTS = 24
CALL = np.dtype(  # struct call in cpu_src/program.c
    [
        ("operation", np.int32),
        ("count", np.int32),
        ("variable", np.int8, MAX_ARGUMENTS),
        ("argument", np.int64, MAX_ARGUMENTS),
    ]
)

# Letters, in cpu._SIGNATURES, of the arguments that a batch brings along: numbers of token rows, requests, pages per request and splits
# with labels; addresses of positions, slots, page table, query_start, context_len, order and labels.
NUMBERS = "TRPX"
ADDRESSES = "ASGQCOL"
VARIABLES = NUMBERS + ADDRESSES


def batch_variables(batch: Batch) -> list[int]:
    """Values of VARIABLES; the addresses last as long as the batch."""
    order, labels = batch.work or (None, None)
    requests, pages_per_request = batch.page_table.shape
    return [
        len(batch.positions),
        requests,
        pages_per_request,
        0 if labels is None else labels.shape[1],
        batch.positions.data_ptr(),
        batch.slots.data_ptr(),
        batch.page_table.data_ptr(),
        batch.query_start.data_ptr(),
        batch.context_len.data_ptr(),
        0 if order is None else order.data_ptr(),
        0 if labels is None else labels.data_ptr(),
    ]


def name_of_call(name: str, arguments: Sequence[float | None]) -> str:
    """An operation's name in a profile: the shapes of a linear layer tell which it is."""
    return f"{name} {arguments[6]} -> {arguments[5]}" if name.startswith("linear") else name


class Recorder:
    """What an operation tells its calls to while a program is written down."""

    def __init__(self, batch: Batch) -> None:
        self._values = batch_variables(batch)
        self.calls: list[tuple[str, str, tuple[float | None, ...]]] = []

    def add(self, name: str, letters: str, arguments: tuple[float | None, ...]) -> None:
        """Raises ValueError for an operation that is about another batch: then it could not be repeated with any."""
        for letter, argument in zip(letters, arguments, strict=True):
            if letter in VARIABLES and (argument or 0) != self._values[VARIABLES.index(letter)]:
                raise ValueError(f"A program's {name} has {argument} where its batch has {self._values}, {letter}.")
        self.calls.append((name, letters, arguments))


class CpuProgram:
    """See interface.Program."""

    def __init__(self, kernels: "CpuKernels") -> None:
        self._kernels = kernels
        # Of `fixed`, when the calls were written down.
        self._places: list[tuple[int, torch.Size, torch.dtype]] | None = None
        self._calls = np.empty(0, CALL)
        self._names: list[str] = []  # of the calls, for profiles

    def __call__(self, body: Callable[[], None], batch: Batch, fixed: Sequence[Tensor]) -> None:
        # Addresses alone would not tell pages from others that have come to lie in the same place, layer by layer further apart.
        places = [(tensor.data_ptr(), tensor.shape[1:], tensor.dtype) for tensor in fixed]
        if places == self._places:
            self._kernels.run(self._calls, self._names, np.array(batch_variables(batch), np.int64))
            return
        self._places = None
        with self._kernels.record(batch) as recorder:
            body()
        self._write(recorder)
        self._places = places

    def _write(self, recorder: Recorder) -> None:
        written = np.zeros(len(recorder.calls), CALL)
        written["variable"] = -1
        for call, (name, letters, arguments) in zip(written, recorder.calls, strict=True):
            call["operation"] = self._kernels.number_of(name)
            call["count"] = len(arguments)
            for index, (letter, argument) in enumerate(zip(letters, arguments, strict=True)):
                if letter in VARIABLES:
                    call["variable"][index] = VARIABLES.index(letter)
                elif letter == "f":
                    call["argument"].view(np.float64)[index] = argument
                else:
                    call["argument"].view(np.uint64)[index] = argument or 0
        self._calls = written
        self._names = [name_of_call(name, arguments) for name, _, arguments in recorder.calls]

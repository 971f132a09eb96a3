"""Plans for requests that a test spells out, and a runner of a tiny model to run them on."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_model
from trunkline.config import ModelSource
from trunkline.kernels.build import BuildError, build_library
from trunkline.models.checkpoint import open_checkpoint
from trunkline.sampling import SamplingParams
from trunkline.step import LogitsRow, Plan
from trunkline.workers.runner import ModelRunner, load_runner

PAGE_SIZE = 8


class Chunk(NamedTuple):
    """Tokens first … last - 1 of a request are to be computed; `pages` holds all of its tokens so far."""

    token_ids: list[int]
    first: int
    last: int
    pages: list[int]


def make_plan(chunks: Sequence[Chunk], *, all_rows: bool = False) -> Plan:
    """A step of these chunks that wants the logits of each one's last row, or of all rows."""
    ends = np.cumsum([chunk.last - chunk.first for chunk in chunks])
    starts = np.array([0, *ends], np.int32)
    page_table = np.zeros((len(chunks), max(len(chunk.pages) for chunk in chunks)), np.int32)
    for request, chunk in enumerate(chunks):
        page_table[request, : len(chunk.pages)] = chunk.pages
    wanted = [
        (request, at)
        for request in range(len(chunks))
        for at in range(starts[request] if all_rows else ends[request] - 1, ends[request])
    ]
    positions = np.concatenate([np.arange(chunk.first, chunk.last, dtype=np.int32) for chunk in chunks])
    greedy = SamplingParams(temperature=0)
    return Plan(
        step=0,
        token_ids=np.concatenate([np.array(chunk.token_ids[chunk.first : chunk.last], np.int32) for chunk in chunks]),
        positions=positions,
        query_start=starts,
        context_len=np.array([chunk.last for chunk in chunks], np.int32),
        page_table=page_table,
        rows=tuple(
            LogitsRow(request=request, at=int(at), position=int(positions[at]) + 1, sampling=greedy)
            for request, at in wanted
        ),
    )


def run(runner: ModelRunner, chunks: Sequence[Chunk], *, all_rows: bool = False) -> Tensor:
    """Logits of the step, [L, V]."""
    plan = make_plan(chunks, all_rows=all_rows)
    return runner.forward(plan, plan.token_ids)


def pages_for(num_tokens: int, first: int = 0, page_size: int = PAGE_SIZE) -> list[int]:
    """Enough pages for so many tokens, from page `first` on."""
    return list(range(first, first + math.ceil(num_tokens / page_size)))


def need_compiler() -> None:
    """Skip the test where the compiled kernels can't be had."""
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"not compiled: {error}")


def tiny_runner(
    folder: Path,
    *,
    dtype: str = "float32",
    threads: int = 1,
    num_pages: int = 200,
    kv_dtype: torch.dtype | None = None,
    **overrides: Any,
) -> ModelRunner:
    """The model of tests.tiny in `folder`, which is written unless it is there, with its pages allocated."""
    path = folder if (folder / "config.json").exists() else tiny_model(folder, **overrides)
    runner = load_runner(open_checkpoint(ModelSource(path=str(path))), dtype, threads, kv_dtype=kv_dtype)
    runner.allocate(num_pages, PAGE_SIZE)
    return runner

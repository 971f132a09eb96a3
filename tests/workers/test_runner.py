"""The forward pass of a step: the same bits however requests are cut into steps, and refusals."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import VOCAB_SIZE, tiny_model
from tests.workers.plans import PAGE_SIZE, Chunk, make_plan, need_compiler, pages_for, run, tiny_runner
from trunkline.config import ModelSource
from trunkline.errors import ConfigError
from trunkline.kernels.build import BuildError
from trunkline.models.checkpoint import open_checkpoint
from trunkline.workers.runner import ModelRunner, load_runner

NUM_PAGES = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    need_compiler()
    return tiny_runner(folder, dtype=request.param)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()


@settings(max_examples=15)
@given(data=st.data())
def test_chunks_neighbours_pages_and_cached_prefixes_do_not_matter(runner: ModelRunner, data: st.DataObject) -> None:
    """Some requests, each read in chunks of any size beside the others, on scattered pages, part of them another's prefix."""
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    expected = [run(runner, [Chunk(prompt, 0, len(prompt), pages_for(len(prompt)))])[0] for prompt in prompts]

    free = data.draw(st.permutations(range(NUM_PAGES)))
    tables = [[free.pop() for _ in pages_for(length)] for length in lengths]
    done = [0] * len(prompts)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        chunks, ends = [], []
        for request, prompt in enumerate(prompts):
            size = data.draw(st.integers(0, lengths[request] - done[request]))
            if size:
                chunks.append(Chunk(prompt, done[request], done[request] + size, tables[request]))
                done[request] += size
                ends.append(request if done[request] == lengths[request] else None)
        if chunks:
            for request, logits in zip(ends, run(runner, chunks), strict=True):
                assert request is None or torch.equal(logits, expected[request])

    fork = data.draw(st.integers(0, len(prompts) - 1))
    shared = (lengths[fork] - 1) // PAGE_SIZE  # whole pages, never the last token: as the radix tree hands them out
    table = tables[fork][:shared] + [free.pop() for _ in pages_for(lengths[fork])[shared:]]
    warm = run(runner, [Chunk(prompts[fork], shared * PAGE_SIZE, lengths[fork], table)])
    assert torch.equal(warm[0], expected[fork])


def test_a_long_prompt_in_steps_across_splits(runner: ModelRunner) -> None:
    prompt = tokens(1100)
    pages = pages_for(1100)
    at_once = run(runner, [Chunk(prompt, 0, 1100, pages)])
    for first in range(0, 1100, 257):
        in_steps = run(runner, [Chunk(prompt, first, min(first + 257, 1100), pages)])
    assert torch.equal(at_once, in_steps)


def test_threads_do_not_matter(folder: Path) -> None:
    need_compiler()
    chunks = [Chunk(tokens(90, seed), 0, 90, pages_for(90, 20 * seed)) for seed in range(3)]
    alone = run(tiny_runner(folder, threads=1), chunks, all_rows=True)
    assert torch.equal(alone, run(tiny_runner(folder, threads=2), chunks, all_rows=True))


def test_logits_only_of_the_rows_wanted(runner: ModelRunner) -> None:
    chunks = [Chunk(tokens(20, seed), 0, 20, pages_for(20, 5 * seed)) for seed in range(2)]
    everything = run(runner, chunks, all_rows=True)
    assert torch.equal(run(runner, chunks), everything[[19, 39]])
    plan = make_plan(chunks)
    nothing = runner.forward(type(plan)(**{name: getattr(plan, name) for name in plan.__slots__ if name != "rows"}, rows=()), plan.token_ids)
    assert nothing.shape == (0, VOCAB_SIZE) and nothing.dtype == torch.float32


def test_unwritten_pages_are_never_read(runner: ModelRunner) -> None:
    assert runner._kv is not None
    for storage in (runner._kv.keys, runner._kv.values):
        storage.fill_(torch.nan)
    assert run(runner, [Chunk(tokens(13), 0, 13, pages_for(13))]).isfinite().all()


def test_what_it_says_of_itself(folder: Path) -> None:
    need_compiler()
    runner = tiny_runner(folder, dtype="auto", threads=2)
    assert runner.dtype == "float16"
    assert runner.device.startswith("cpu (2 threads, compiled kernels")
    assert runner.page_bytes(16) == 2 * 2 * 2 * 16 * 16 * 2  # K and V, layers, heads, size of a head, tokens, bytes
    assert runner.config.vocab_size == VOCAB_SIZE


def test_a_bfloat16_checkpoint_stays_bfloat16(tmp_path: Path) -> None:
    need_compiler()
    runner = tiny_runner(tmp_path, dtype="auto", **{"dtype_of_file": None} if False else {})
    assert runner.dtype == "float16"

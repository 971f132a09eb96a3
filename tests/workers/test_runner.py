"""The forward pass of a step: the same bits however requests are cut into steps, and refusals."""

import dataclasses
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

    free = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(NUM_PAGES).tolist()
    tables = [[free.pop() for _ in pages_for(length)] for length in lengths]
    cuts = [sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=5))}) for length in lengths]
    starts = [data.draw(st.integers(0, 2)) for _ in prompts]  # the step at which each request comes
    for step in range(2 + max(map(len, cuts))):
        running = [request for request, start in enumerate(starts) if start <= step < start + len(cuts[request]) - 1]
        spans = [cuts[request][step - starts[request] :][:2] for request in running]
        if running:
            logits = run(
                runner,
                [Chunk(prompts[r], first, last, tables[r]) for r, (first, last) in zip(running, spans, strict=True)],
            )
        for at, (request, (_, last)) in enumerate(zip(running, spans, strict=True)):
            assert last < lengths[request] or torch.equal(logits[at], expected[request])

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


@pytest.mark.parametrize("rest", range(1, 2 * PAGE_SIZE + 1))
def test_however_little_is_left_after_a_cached_prefix(runner: ModelRunner, rest: int) -> None:
    """One row alone, a page, more than a page: the bits of the whole prompt read at once."""
    prompt = tokens(3 * PAGE_SIZE + rest)
    pages = pages_for(len(prompt))
    whole = run(runner, [Chunk(prompt, 0, len(prompt), pages)])
    shared = len(prompt) - rest
    run(runner, [Chunk(prompt[:shared], 0, shared, pages[:3])])
    own = pages_for(len(prompt) - shared, first=50)
    assert torch.equal(run(runner, [Chunk(prompt, shared, len(prompt), [*pages[:3], *own])]), whole)


def test_threads_do_not_matter(folder: Path) -> None:
    need_compiler()
    chunks = [Chunk(tokens(90, seed), 0, 90, pages_for(90, 20 * seed)) for seed in range(3)]
    alone = run(tiny_runner(folder, threads=1), chunks, all_rows=True)
    assert torch.equal(alone, run(tiny_runner(folder, threads=2), chunks, all_rows=True))


def test_logits_only_of_the_rows_wanted(runner: ModelRunner) -> None:
    chunks = [Chunk(tokens(20, seed), 0, 20, pages_for(20, 5 * seed)) for seed in range(2)]
    everything = run(runner, chunks, all_rows=True)
    assert torch.equal(run(runner, chunks), everything[[19, 39]])
    plan = dataclasses.replace(make_plan(chunks), rows=())
    nothing = runner.forward(plan, plan.token_ids)
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
    runner = tiny_runner(tiny_model(tmp_path, dtype="bfloat16"), dtype="auto")
    assert runner.dtype == "bfloat16"
    assert runner.page_bytes(8) == 2 * 2 * 2 * 16 * 8 * 2, "keys and values beside bfloat16 weights take 2 bytes"


def test_without_a_compiler_torch_does_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler() -> Path:
        raise BuildError("there is no C compiler here")

    expected = run(tiny_runner(folder), [Chunk(tokens(30), 0, 30, pages_for(30))], all_rows=True)
    monkeypatch.setattr("trunkline.kernels.cpu.build_library", no_compiler)
    with caplog.at_level(logging.WARNING):
        runner = tiny_runner(folder, dtype="auto")
    assert "there is no C compiler here" in caplog.text and "several times slower" in caplog.text
    assert (runner.dtype, runner.device) == ("float32", "cpu (torch kernels: no compiler)")
    torch.testing.assert_close(
        run(runner, [Chunk(tokens(30), 0, 30, pages_for(30))], all_rows=True), expected, atol=1e-4, rtol=1e-5
    )


def test_head_sizes_the_compiled_kernels_do_not_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_compiler()
    with caplog.at_level(logging.WARNING):
        runner = tiny_runner(tmp_path, dtype="auto", head_dim=12)
    assert "not 12" in caplog.text and runner.device == "cpu (torch kernels: head size 12)"
    assert run(runner, [Chunk(tokens(9), 0, 9, pages_for(9))]).isfinite().all()


def test_refusals(folder: Path) -> None:
    need_compiler()
    checkpoint = open_checkpoint(ModelSource(path=str(folder)))
    with pytest.raises(ConfigError, match="--dtype is 'int3'; allowed are auto, float32"):
        load_runner(checkpoint, "int3")
    runner = load_runner(checkpoint, threads=1)
    with pytest.raises(ConfigError, match="--block-size is 12; allowed are 8, 16"):
        runner.allocate(10, 12)


@pytest.mark.parametrize(
    ("chunk", "complaint"),
    [
        (Chunk([1, 2], 0, 2, [NUM_PAGES]), "names pages 200 to 200"),
        (Chunk([1, 2], 0, 2, [-1]), "names pages -1"),
        (Chunk([1] * 9, 0, 9, [3]), "too few for context_len"),
        (Chunk([1, VOCAB_SIZE], 0, 2, [3]), "the vocabulary is"),
        (Chunk([1, -1], 0, 2, [3]), "reach from -1"),
    ],
)
def test_plans_that_lead_astray_are_refused(runner: ModelRunner, chunk: Chunk, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run(runner, [chunk])


def test_progress_is_reported(folder: Path) -> None:
    need_compiler()
    seen: list[tuple[int, int]] = []
    load_runner(
        open_checkpoint(ModelSource(path=str(folder))),
        threads=1,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]

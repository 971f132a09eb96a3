"""Sums of hidden states: those of `transformers`, whatever the chunks and neighbours; refusals; and on a device that works late."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reference_model import hidden_states
from tests.tiny import VOCAB_SIZE, tiny_model
from tests.workers.plans import PAGE_SIZE, Chunk, make_plan, need_compiler, pages_for, tiny_runner
from tests.workers.test_gpu_worker import make_worker
from trunkline.config import ModelSource
from trunkline.kernels.reference import ReferenceKernels
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.layers import Loader
from trunkline.models.registry import make_model
from trunkline.step import Plan, PooledRows
from trunkline.workers.pooling import unsound
from trunkline.workers.runner import ModelRunner
from trunkline.workers.weight_format import WeightFormat
from trunkline.workers.worker import check_rows

PROMPTS = [
    np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist() for seed, count in enumerate((60, 1, 33))
]
TABLES = [pages_for(60), pages_for(1, first=20), pages_for(33, first=30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def hidden(folder: Path) -> list[np.ndarray]:
    return hidden_states(folder, PROMPTS)


def reference_runner(folder: Path) -> ModelRunner:
    kernels, checkpoint = ReferenceKernels(torch.float32), open_checkpoint(ModelSource(path=str(folder)))
    model = make_model(checkpoint.config, Loader(checkpoint.tensors(), kernels, torch.float32))
    runner = ModelRunner(model, kernels, WeightFormat(torch.float32, "none", "float32"))
    runner.allocate(200, PAGE_SIZE)
    return runner


def pooling(chunks: list[Chunk], *pooled: PooledRows) -> Plan:
    return dataclasses.replace(make_plan(chunks), pooled=pooled)


@pytest.mark.parametrize("kernels", ["reference", "compiled"])
def test_sums_are_those_of_transformers(folder: Path, hidden: list[np.ndarray], kernels: str) -> None:
    """All rows, some, and one; of several requests in a step, one of them in two chunks."""
    if kernels == "compiled":
        need_compiler()
    runner = tiny_runner(folder) if kernels == "compiled" else reference_runner(folder)
    first = pooling([Chunk(PROMPTS[0], 0, 41, TABLES[0])], PooledRows(0, 0, 41))
    runner.forward(first, first.token_ids)
    np.testing.assert_allclose(runner.pool(first), [hidden[0][:41].sum(0)], atol=1e-4)
    second = pooling(
        [Chunk(PROMPTS[0], 41, 60, TABLES[0]), Chunk(PROMPTS[1], 0, 1, TABLES[1]), Chunk(PROMPTS[2], 0, 33, TABLES[2])],
        PooledRows(0, 0, 19),
        PooledRows(2, 20 + 32, 20 + 33),
        PooledRows(1, 19, 20),
    )
    logits = runner.forward(second, second.token_ids)
    sums = runner.pool(second)
    expected = [hidden[0][41:].sum(0), hidden[2][32], hidden[1][0]]
    assert sums.dtype == np.float64 and sums.shape == (3, 64)
    np.testing.assert_allclose(sums, expected, atol=1e-4)
    np.testing.assert_array_equal(runner.pool(second), sums)
    np.testing.assert_array_equal(runner.forward(second, second.token_ids), logits)


def test_a_row_does_not_depend_on_its_neighbours(folder: Path) -> None:
    need_compiler()
    runner = tiny_runner(folder, dtype="float16")

    def sums(plan: Plan) -> np.ndarray:
        runner.forward(plan, plan.token_ids)
        return runner.pool(plan)

    alone = sums(pooling([Chunk(PROMPTS[2], 0, 33, TABLES[2])], PooledRows(0, 0, 33)))
    chunks = [Chunk(PROMPTS[0], 0, 60, TABLES[0]), Chunk(PROMPTS[2], 0, 33, TABLES[2])]
    together = sums(pooling(chunks, PooledRows(0, 3, 59), PooledRows(1, 60, 93)))
    np.testing.assert_array_equal(together[1], alone[0])


@pytest.mark.parametrize(
    "wrong",
    [PooledRows(2, 0, 1), PooledRows(-1, 0, 1), PooledRows(0, 0, 5), PooledRows(0, 2, 2), PooledRows(1, 3, 5)],
)
def test_rows_of_others_are_refused(wrong: PooledRows) -> None:
    chunks = [Chunk([1, 2, 3, 4], 0, 4, [0]), Chunk([5, 6, 7], 0, 3, [1])]
    check_rows(pooling(chunks, PooledRows(0, 0, 4), PooledRows(1, 4, 7)))
    with pytest.raises(ValueError, match="sums"):
        check_rows(pooling(chunks, wrong))


def test_a_sum_that_is_not_finite_fails_its_row() -> None:
    chunks = [Chunk([1, 2, 3, 4], 0, 4, [0]), Chunk([5, 6, 7], 0, 3, [1])]
    plan = pooling(chunks, PooledRows(1, 4, 7), PooledRows(0, 0, 4))
    assert unsound(np.array([[1.0, 2.0], [3.0, 4.0]]), plan) == {}
    (found,) = unsound(np.array([[1.0, np.inf], [3.0, 4.0]]), plan).items()
    assert found[0] == 1 and "up to position 2 are not finite" in found[1]


@pytest.mark.parametrize("seed", range(4))
def test_on_a_device_that_works_late(seed: int) -> None:
    """Two steps in flight; the second has one token for each request, and would be a graph's if nothing were summed."""
    worker = make_worker(seed=seed)
    try:
        plans = [
            pooling(
                [Chunk([5, 9, 2, 7], 0, 4, [3]), Chunk([8, 1], 0, 2, [4])], PooledRows(1, 4, 6), PooledRows(0, 1, 4)
            ),
            pooling([Chunk([40], 0, 1, [5]), Chunk([50], 0, 1, [6])], PooledRows(0, 0, 1), PooledRows(1, 1, 2)),
        ]
        handles = [worker.submit(plan) for plan in plans]
        results = [worker.wait(handle) for handle in handles]
    finally:
        worker.close()
    assert [result.pooled is not None and result.pooled.tolist() for result in results] == [
        [[9, 2], [18, 3]],
        [[40, 1], [50, 1]],
    ]

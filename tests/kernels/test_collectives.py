"""What ranks do together, over real gloo groups in threads; and one rank alone."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.ranks import on_ranks
from trunkline.kernels.collectives import ALONE, CollectiveError, Collectives, Ranks, connect

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_and_parts_in_the_order_of_ranks(tmp_path: Path, size: int) -> None:
    def work(ranks: Collectives) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for dtype in DTYPES:
            total = part(ranks.rank, (5, 7), dtype)
            gathered = ranks.all_gather(total)
            ranks.all_reduce(total)
            results.append((total, gathered))
        return results

    for results in on_ranks(size, tmp_path / "ranks", work):
        for dtype, (total, gathered) in zip(DTYPES, results, strict=True):
            parts = [part(rank, (5, 7), dtype) for rank in range(size)]
            expected = parts[0]
            for other in parts[1:]:
                expected = expected + other
            assert total.dtype == dtype and torch.equal(total, expected), "the same bits on every rank"
            assert torch.equal(gathered, torch.stack(parts))


def test_a_row_is_the_same_whatever_is_beside_it(tmp_path: Path) -> None:
    """gloo's own sum cuts a tensor into pieces, and begins each with another rank."""

    def work(ranks: Collectives) -> list[torch.Tensor]:
        sums = []
        for rows in (1, 2, 9, 64):
            x = part(ranks.rank, (64, 33))[:rows].clone()
            ranks.all_reduce(x)
            sums.append(x[0])
        return sums

    for sums in on_ranks(3, tmp_path / "ranks", work):
        assert all(torch.equal(row, sums[0]) for row in sums)


def test_nothing_to_exchange(tmp_path: Path) -> None:
    def work(ranks: Collectives) -> torch.Size:
        empty = torch.empty(0, 7)
        ranks.all_reduce(empty)
        return ranks.all_gather(empty).shape

    assert on_ranks(2, tmp_path / "ranks", work) == [(2, 0, 7)] * 2


def test_the_least_of_all_numbers(tmp_path: Path) -> None:
    assert (
        on_ranks(3, tmp_path / "ranks", lambda ranks: ranks.minimum(2**40 + [7, 3, 5][ranks.rank])) == [2**40 + 3] * 3
    )


def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    names = [hashlib.sha256(text).digest() for text in (b"a", b"a", b"b")]
    on_ranks(2, tmp_path / "alike", lambda ranks: ranks.compare(names[ranks.rank], "model"))

    def complaint(ranks: Collectives) -> str:
        with pytest.raises(CollectiveError) as caught:
            ranks.compare(names[ranks.rank], "model")
        return str(caught.value)

    assert on_ranks(3, tmp_path / "differ", complaint) == ["Rank 2 of 3 has another model than rank 0."] * 3


def test_a_rank_that_left_is_noticed_by_the_others(tmp_path: Path) -> None:
    def work(ranks: Collectives) -> bool:
        ranks.minimum(1)
        if ranks.rank == 1:
            return True
        with pytest.raises(CollectiveError, match="lost each other"):
            ranks.all_reduce(torch.ones(3))
        return True

    assert on_ranks(2, tmp_path / "ranks", work) == [True, True]


def test_after_closing_nothing_goes(tmp_path: Path) -> None:
    def work(ranks: Collectives) -> None:
        ranks.close()
        ranks.close()
        with pytest.raises(CollectiveError):
            ranks.minimum(1)

    on_ranks(2, tmp_path / "ranks", work)


def test_one_rank_alone_does_nothing(tmp_path: Path) -> None:
    assert connect(tmp_path / "there is none", rank=0, size=1, device=torch.device("cpu")) is ALONE
    x = torch.ones(2, 3)
    ALONE.all_reduce(x)
    ALONE.compare(b"", "model")
    ALONE.close()
    assert (ALONE.rank, ALONE.size, ALONE.minimum(5)) == (0, 1, 5)
    assert torch.equal(x, torch.ones(2, 3)) and torch.equal(ALONE.all_gather(x), x[None])


def test_what_waits_on_gpus_is_aborted() -> None:
    aborted: list[bool] = []
    host: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2, shutdown=lambda: None)
    ranks = Ranks(host, SimpleNamespace(abort=lambda: aborted.append(True)))
    ranks.abort()
    assert aborted == [True]
    ranks.close()
    ranks.abort()
    Ranks(host).abort()
    ALONE.abort()
    assert aborted == [True], "there is nothing to end"

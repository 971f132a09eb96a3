"""The trace that comes with the project is the one its script makes, and shows what a cache is good for."""

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import sample_trace
from trunkline.cli import main
from trunkline.traces import HASH_BLOCK, read_trace

FILE = Path(sample_trace.__file__).with_suffix(".jsonl")


def test_the_file_is_what_the_script_makes() -> None:
    assert FILE.read_text().splitlines() == list(sample_trace.lines())


def test_ids_stand_for_a_block_and_all_before_it() -> None:
    before: dict[int, int] = {}
    rows = read_trace(FILE)
    for row in rows:
        assert row.block_size == HASH_BLOCK
        ids = [-1, *row.blocks.tolist()]
        for parent, block in pairwise(ids):
            assert before.setdefault(block, parent) == parent
    arrivals = [row.arrival for row in rows]
    assert len(rows) > 200 and arrivals == sorted(arrivals)


@pytest.mark.slow
def test_it_can_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", str(FILE), "--cache-tokens", "64K,256K"]) == 0
    small, large = (line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| window"))
    assert float(small[4].rstrip("% ")) < float(large[4].rstrip("% "))

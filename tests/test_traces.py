"""Reading recorded traffic: what the ids say about the tokens, and what is no trace."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trunkline.errors import ConfigError
from trunkline.traces import FIRST_OUTPUT_TOKEN, HASH_BLOCK, RUN_BLOCK, read_trace, spread


def write(path: Path, *rows: Any) -> Path:
    """A trace file; rows that are text stand in it as they are."""
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def row(timestamp: int, num_prompt: int, *ids: int, output: int = 5) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": num_prompt, "output_length": output, "hash_ids": list(ids)}


def token_ids(prompt: bytes) -> list[int]:
    return np.frombuffer(prompt, "<i4").tolist()


def test_equal_ids_are_equal_tokens(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", row(1000, 700, 10**12, 7), row(1500, 1024, 10**12, 8), row(1600, 512, 7))
    first, second, third = read_trace(trace)
    assert [first.arrival, second.arrival, third.arrival] == pytest.approx([0.0, 0.5, 0.6])
    assert (first.num_prompt, first.num_output, first.block_size) == (700, 5, HASH_BLOCK)
    a, b, c = (token_ids(one.prompt()) for one in (first, second, third))
    assert len(a) == 700 and len(b) == 1024 and len(c) == 512
    assert a[:512] == b[:512] and a[512:] == c[:188]
    assert not set(b[512:]) & set(a)
    assert len(set(b)) == 1024 and min(b) >= 0 and max(b) < FIRST_OUTPUT_TOKEN


def test_ids_in_runs_stand_for_fewer_tokens(tmp_path: Path) -> None:
    line = {"session": "a", "timestamp": 0, "input_length": 60, "output_length": 0, "runs": [[9, 3], [1, 1]]}
    (only,) = read_trace(write(tmp_path / "t.jsonl", line))
    assert only.block_size == RUN_BLOCK and only.blocks.tolist() == [0, 1, 2, 3]
    assert len(token_ids(only.prompt())) == 60
    assert only.num_output == 1, "a request generates a token at least"


def test_only_the_first_rows(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", row(0, 3, 1), "", row(0, 0), row(0, 4, 1), "no row")
    assert [one.num_prompt for one in read_trace(trace, limit=4)] == [3, 4], "without those that have no prompt"


def test_rounded_timestamps_are_spread_over_their_ticks(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path / "t.jsonl", *(row(3000 * (i // 50), 1 + i, i) for i in range(100))))
    moved = spread(rows, seed=3)
    assert [one.arrival for one in moved] == sorted(one.arrival for one in moved)
    assert {one.num_prompt for one in moved} == set(range(1, 101))
    for one in moved:
        tick = 3.0 * ((one.num_prompt - 1) // 50)
        assert tick <= one.arrival < tick + 3
    assert len({one.arrival for one in moved}) == 100
    assert [one.arrival for one in spread(rows, seed=3)] == [one.arrival for one in moved]
    assert [one.arrival for one in spread(rows, seed=4)] != [one.arrival for one in moved]


def test_exact_timestamps_stay(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path / "t.jsonl", row(0, 1, 1), row(4100, 2, 1), row(4010, 3, 1), row(4010, 4, 1)))
    assert [(one.arrival, one.num_prompt) for one in spread(rows)] == [(0, 1), (4.01, 3), (4.01, 4), (4.1, 2)]
    (alone,) = spread(rows[:1])
    assert alone.arrival == 0.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is no request of a trace: Input data was truncated."),
        ("[]", "line 2 is no request of a trace: Expected `object`, got `array`."),
        ({"timestamp": 0, "input_length": 1}, "missing required field `output_length`."),
        ({**row(0, 9, 1), "input_length": "9"}, "Expected `int`, got `str` - at `$.input_length`."),
        ({"timestamp": 0, "input_length": 1, "output_length": 1}, "it has neither hash_ids nor runs."),
        (row(0, 1024, 1), "1024 tokens are 2 blocks of 512 tokens, but there are 1 ids."),
        (row(0, 512, 1, 2), "512 tokens are 1 blocks of 512 tokens, but there are 2 ids."),
        ({"timestamp": 0, "input_length": 16, "output_length": 1, "runs": [[1, 1]]}, "not both in one file."),
        (row(-1, 512, 1), "timestamp and lengths must not be negative."),
        ({**row(0, 512, 1), "output_length": 10**12}, "lengths must not be above 1073741824."),
        (
            {"timestamp": 0, "input_length": 16, "output_length": 1, "runs": [[1, 10**12]]},
            "16 tokens are 1 blocks of 16 tokens, but there are 1000000000000 ids.",
        ),
    ],
)
def test_what_is_no_trace(tmp_path: Path, line: Any, says: str) -> None:
    trace = write(tmp_path / "t.jsonl", row(0, 1, 1), line)
    with pytest.raises(ConfigError) as error:
        read_trace(trace)
    assert str(error.value).startswith(f"{trace}, line 2 is no request of a trace: ")
    assert str(error.value).endswith(says)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match=r"no\.jsonl cannot be read: No such file or directory\.$"):
        read_trace(tmp_path / "no.jsonl")

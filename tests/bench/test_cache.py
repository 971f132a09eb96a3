"""`trunkline bench cache`: that it measures what it says. How fast it is, no test asserts."""

import json
from pathlib import Path
from typing import Any

import pytest

from trunkline.bench import cache as bench
from trunkline.bench import cache_cli
from trunkline.bench.replay import replay
from trunkline.cli import main
from trunkline.errors import ConfigError
from trunkline.radix.cache import PrefixCache
from trunkline.traces import read_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six prompts of 1,100 tokens: three that are the same but for their last page and a half, twice each."""
    path = tmp_path / "few.jsonl"
    rows = [
        {"timestamp": i, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 10 + i % 3]} for i in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trees, and no patience."""
    small: dict[str, Any] = {
        "MATCH_LENGTHS": (1024,),
        "LEAVES": (64, 128),
        "EVICTED_PAGES": (1, 16),
        "NODE_PAGES": (4,),
    }
    for name, value in {**small, "ROUNDS": 1, "ROUND_SECONDS": 1e-5, "METADATA_PAGES": 256, "INSERTS": 4}.items():
        monkeypatch.setattr(bench, name, value)


def test_replay_counts_whole_pages_of_prompts_alone(trace: Path) -> None:
    result = replay(PrefixCache(num_pages=1000, page_size=16), read_trace(trace))
    assert (result.requests, result.prompt_tokens) == (6, 6600)
    # the first finds nothing, two find 1,024 tokens, and three find all whole pages but that of the last token
    assert result.hit_tokens == 2 * 1024 + 3 * (1099 // 16 * 16)
    assert result.hit_rate == result.hit_tokens / 6600 and result.requests_per_cpu_second > 0


def test_replay_evicts_and_lets_go(trace: Path) -> None:
    cache = PrefixCache(num_pages=70, page_size=16)
    assert replay(cache, read_trace(trace), running=1).hit_tokens < 3 * 1024 + 3 * 1088
    assert cache.stats().tree_locked == 0
    cache.check()
    with pytest.raises(ConfigError, match="A prompt of 1,100 tokens does not fit beside 7 others"):
        replay(PrefixCache(num_pages=70, page_size=16), read_trace(trace))


def test_trees_are_those_that_are_described() -> None:
    prompt = bench.tokens(1025)
    whole, chain = bench.warm_cache(prompt, 1024), bench.warm_cache(prompt, bench.CHAIN_NODE)
    assert (whole.stats().nodes, chain.stats().nodes) == (1, 2)
    broad = bench.broad_cache(50)
    assert (broad.stats().nodes, broad.stats().free) == (50, 0)
    for cache in (whole, chain, broad):
        cache.check()
        assert cache.stats().tree_locked == 0


def test_a_page_takes_at_most_a_hundred_bytes() -> None:
    assert 68 < bench.metadata_bytes(32, num_pages=8192) <= 100, "64 are its tokens, and 4 its id"


@pytest.mark.usefixtures("quick")
def test_tables(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--trace", str(trace), "--rows", "3"]) == 0
    printed = capsys.readouterr().out
    for words in ("startswith", "match, chain", "of 128 leaves", "bytes a page", "requests per CPU-second", "0.6206"):
        assert words in printed


@pytest.mark.usefixtures("quick")
def test_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    (match,) = found["match"]
    assert match["tokens"] == 1024 and all(value > 0 for value in match.values())
    assert [(one["pages"], one["leaves"]) for one in found["evict"]] == [(1, 64), (1, 128), (16, 64), (16, 128)]
    assert [one["cache_tokens"] for one in found["replay"]] == list(cache_cli.REPLAY_SIZES)
    assert found["machine"]["python"]


@pytest.mark.usefixtures("quick")
def test_without_a_trace_nothing_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache"]) == 0
    assert "Replay" not in capsys.readouterr().out


def test_mistakes_get_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, says in (
        (["--rows", "0"], "--rows is 0; allowed is 1 and more."),
        (["--trace", str(tmp_path / "none")], "cannot be read: No such file or directory."),
    ):
        assert main(["bench", "cache", *flags]) == 1
        printed = capsys.readouterr()
        assert says in printed.err and printed.err.count("\n") == 1

"""Loads of `trunkline bench serve`: what is sent and when, what is made of the answers, and all of it over real sockets."""

import itertools
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fake_server import FakeServer
from tests.bench.test_texts import by_words
from trunkline.bench import cli
from trunkline.bench.client import Outcome
from trunkline.bench.load import DATASETS, Shape, Timed, arrivals, make_load
from trunkline.bench.load_cli import DATASETS as NAMED_DATASETS
from trunkline.bench.load_cli import METRICS as NAMED_METRICS
from trunkline.bench.load_report import METRICS, load_numbers, load_table
from trunkline.bench.texts import Texts
from trunkline.errors import ConfigError

TEXTS = Texts(by_words)


def load(rate: float = math.inf, speed: float = 1.0, **shape: Any) -> list[Timed]:
    return make_load(
        Shape(**{"num_prompts": 12, "input_len": 24, "output_len": 6, **shape}),
        TEXTS,
        rate=rate,
        burstiness=1.0,
        speed=speed,
    )


def prompts(timed: list[Timed]) -> list[str]:
    return [one.turn.prompt or "" for one in timed]


def test_the_command_line_knows_the_same_names() -> None:
    assert (NAMED_DATASETS, NAMED_METRICS) == (DATASETS, METRICS)


def test_random_prompts_have_their_lengths_and_share_a_prefix() -> None:
    sent = load(prefix_len=32)
    assert {len(by_words(prompt)) for prompt in prompts(sent)} == {32 + 24}
    assert len({tuple(by_words(prompt)[:32]) for prompt in prompts(sent)}) == 1
    assert len(set(prompts(sent))) == 12
    assert {one.turn.max_tokens for one in sent} == {6}
    assert prompts(load(prefix_len=32)) == prompts(sent) != prompts(load(prefix_len=32, seed=1))


def test_lengths_vary_around_what_was_asked_for() -> None:
    sent = load(num_prompts=200, input_len=100, range_ratio=0.5, output_len=10)
    lengths = [len(by_words(prompt)) for prompt in prompts(sent)]
    assert 50 <= min(lengths) < 70 and 130 < max(lengths) <= 150
    assert {one.turn.max_tokens for one in sent} == set(range(5, 16))


def test_prefixes_are_repeated_equally_often() -> None:
    sent = load(dataset="prefix_repetition", prefix_len=32, num_prefixes=3)
    shared = Counter(tuple(by_words(prompt)[:32]) for prompt in prompts(sent))
    assert sorted(shared.values()) == [4, 4, 4]
    assert [tuple(by_words(prompt)[:32]) for prompt in prompts(sent)] != sorted(shared) * 4, "they are mixed"


def trace(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_trace_is_sent_as_it_was_recorded(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        {"timestamp": 1000, "input_length": 1024, "output_length": 64, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 512, "hash_ids": [7, 9, 10]},
    )
    first, second = load(dataset="trace", path=path, block_tokens=64)
    assert (first.arrival, second.arrival) == (0, 2)
    tokens = [by_words(one.turn.prompt or "") for one in (first, second)]
    assert (len(tokens[0]), len(tokens[1])) == (128, 128 + 9)  # 76 of 512 tokens are 9.5 of 64
    assert tokens[0][:64] == tokens[1][:64] and tokens[0][64:128] != tokens[1][64:128]
    assert (first.turn.max_tokens, second.turn.max_tokens) == (8, 64)
    assert [one.arrival for one in load(dataset="trace", path=path, block_tokens=64, speed=4.0)] == [0, 0.5]
    assert load(dataset="trace", path=path, block_tokens=64, rate=10.0)[1].arrival not in (0, 2)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two"}\n\n{"prompt": "three", "output_tokens": 2}\n{"prompt": "four"}\n')
    sent = load(dataset="custom", path=str(path), num_prompts=2, chat=True)
    assert [one.turn.messages for one in sent] == [
        ({"role": "user", "content": text},) for text in ("one two", "three")
    ]
    assert [(one.turn.prompt_tokens, one.turn.max_tokens) for one in sent] == [(2, 6), (1, 2)]
    assert sent[0].turn.path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": ""}', "prompts.jsonl, line 1 is no prompt"),
        ("[]", "line 1 is no prompt"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1 is no prompt"),
        ("", "which holds no prompt"),
        (None, "which cannot be read: No such file"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(dataset="custom", path=str(path))
    with pytest.raises(ConfigError, match="name it with --dataset-path"):
        load(dataset="trace")


def test_requests_come_at_the_rate() -> None:
    times = arrivals(4000, rate=5.0, burstiness=1.0, seed=0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0 and statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.15), "of a Poisson process as large as the mean"
    even = arrivals(4000, rate=5.0, burstiness=100.0, seed=0)
    assert statistics.stdev([b - a for a, b in itertools.pairwise(even)]) < 0.05
    assert arrivals(3, rate=math.inf, burstiness=1.0, seed=0) == [0, 0, 0]


def answered(**facts: Any) -> Outcome:
    known = {"started": 0.0, "first": 0.1, "last": 0.4, "finished": 0.5, "gaps": [0.1, 0.2], "completion_tokens": 4}
    return Outcome(**{**known, "prompt_tokens": 32, "cached_tokens": 8, **facts})


def test_numbers_have_vllms_names() -> None:
    outcomes = [answered(), answered(first=0.3), answered(error="HTTP 500: no")]
    numbers = load_numbers(outcomes, 2.0, percentiles=[50, 99], goodput={"ttft": 200, "tpot": 150})
    assert (numbers["completed"], numbers["failed"], numbers["first_error"]) == (2, 1, "HTTP 500: no")
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"], numbers["cached_token_ratio"]) == (
        64,
        8,
        0.25,
    )
    assert (numbers["request_throughput"], numbers["output_throughput"], numbers["total_token_throughput"]) == (
        1,
        4,
        36,
    )
    assert (numbers["mean_ttft_ms"], numbers["median_ttft_ms"], numbers["std_ttft_ms"]) == (200, 200, 100)
    assert numbers["p99_ttft_ms"] == pytest.approx(298)
    assert (numbers["mean_tpot_ms"], numbers["p50_itl_ms"], numbers["mean_e2el_ms"]) == (
        pytest.approx(66.667),
        150,
        500,
    )
    assert numbers["request_goodput"] == 0.5, "the second took too long for its first token"
    table = load_table(numbers, metrics=["ttft", "itl"], percentiles=[50, 99])
    assert "TTFT" in table and "ITL" in table and "TPOT" not in table and "16 of them cached, 25.0 %" in table


def test_numbers_of_nothing() -> None:
    numbers = load_numbers([answered(error="x", gaps=[])], 1.0, percentiles=[99], goodput={})
    assert (numbers["completed"], numbers["cached_token_ratio"], numbers["mean_ttft_ms"], numbers["p99_itl_ms"]) == (
        0,
        None,
        None,
        None,
    )
    assert "–" in load_table(numbers, metrics=["ttft"], percentiles=[99])


@pytest.fixture
def by_word_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "make_texts", lambda path: TEXTS)


@pytest.mark.slow
def test_a_load_over_real_sockets(by_word_lengths: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "numbers.json"
    flags = [
        "--num-prompts",
        "10",
        "--input-len",
        "16",
        "--output-len",
        "5",
        "--prefix-len",
        "16",
        "--output",
        str(output),
    ]
    with FakeServer() as server:
        assert cli.main(["--base-url", server.url, *flags, "--max-concurrency", "2", "--request-rate", "200"]) == 0
        bodies = [body for _, body in server.requests]
        assert server.most_at_once <= 2
    assert len(bodies) == 1 + 10, "one to warm up"
    assert all(body["max_tokens"] == 5 and body["ignore_eos"] and body["stream"] for body in bodies[1:])
    numbers = json.loads(output.read_text())
    assert (numbers["completed"], numbers["total_output_tokens"], numbers["total_cached_tokens"]) == (10, 50, 160)
    assert numbers["dataset"]["prefix_len"] == 16 and numbers["request_rate"] == 200
    assert numbers["mean_itl_ms"] is not None
    assert "10 completed, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_failures_of_a_load(by_word_lengths: None, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--dataset-name",
        "random",
        "--num-prompts",
        "3",
        "--input-len",
        "16",
        "--endpoint",
        "/v1/chat/completions",
    ]
    with FakeServer(refuses=lambda body: "busy") as server:
        assert cli.main(["--base-url", server.url, *flags, "--no-ignore-eos"]) == 1
        path, body = server.requests[-1]
    assert path == "/v1/chat/completions" and "ignore_eos" not in body
    assert 'The first error: HTTP 400: {"error": {"message": "busy"}}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workload", "W1", "--request-rate", "2"], "--workload and --request-rate are two ways"),
        (["--workload", "W1", "--input-len", "2"], "--workload and --input-len are two ways"),
        (["--num-prompts", "0"], "--num-prompts is 0; allowed is 1 and more."),
        (["--request-rate", "0"], "--request-rate is 0; allowed is any number above 0."),
        (["--num-prompts", "1", "--range-ratio", "2"], "--range-ratio is 2; allowed is 0 to 1."),
        (["--num-prompts", "1", "--prefix-len", "3"], "--prefix-len is 3; allowed is 0, or 8 and more."),
        (["--dataset-path", "x"], "say what is in it with --dataset-name"),
        (["--num-prompts", "1", "--percentile-metrics", "ttfb"], "--percentile-metrics is 'ttfb'; allowed are ttft,"),
        (["--num-prompts", "1", "--metric-percentiles", "101"], "--metric-percentiles is '101'; allowed are numbers"),
        (["--goodput", "ttft"], "--goodput is 'ttft'; allowed is a metric and milliseconds"),
        (["--goodput", "x:1"], "--goodput is 'x:1'"),
    ],
)
def test_flags_of_a_load_are_checked_first(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(flags) == 1
    assert says in capsys.readouterr().err

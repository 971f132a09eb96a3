"""`trunkline simulate`, as it is typed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trunkline.cli import main
from trunkline.scheduler.cost_model import PROFILES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests, 100 ms apart, of which each begins as the three before it."""
    path = tmp_path / "few.jsonl"
    rows = [
        {
            "timestamp": 100 * i,
            "input_length": 1100,
            "output_length": 4,
            "hash_ids": [10 + i // 4, 100 + i // 4, 1000 + i],
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulate(trace: Path, *flags: str, cache: str = "16K") -> int:
    return main(["simulate", "--trace", str(trace), "--cache-tokens", cache, *flags])


def cells(printed: str) -> list[list[str]]:
    """The body of the tables."""
    rows = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("|") and "--" not in line]
    return [[cell.strip() for cell in row] for row in rows]


def test_table_has_a_line_for_each_policy_and_size(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--policy", "fcfs", "window", "fcfs", cache="16K,8192") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("few.jsonl on h100-llama8b: 12 requests in 1.1 s, 13,200 tokens in, 48 out\n")
    head, *body = cells(printed.out)
    assert head[:4] == ["policy", "cache", "memory", "hit rate"]
    sizes = (("8,192", "1.0 GiB"), ("16,384", "2.0 GiB"))
    assert [row[:3] for row in body] == [[policy, *size] for policy in ("fcfs", "window") for size in sizes]
    assert all(row[3] == "69.8 %" for row in body), "of the 13,200 tokens 9 × 1,024 were read before"
    assert printed.err.count("simulated") == 4


def test_every_number_as_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--json", "--load", "0.5", "--rows", "6", "--block-size", "32") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    (point,) = found["points"]
    assert (point["policy"], point["cache_tokens"]) == ("window", 16384)
    assert point["report"]["total"]["finished"] == 6
    assert set(point["report"]["total"]["ttft"]) == {"mean", "p50", "p90", "p99", "max"}
    scenario = found["scenario"]
    assert (scenario["trace"], scenario["load"], scenario["cache"]["block_size"]) == ("few.jsonl", 0.5, 32)
    assert scenario["scheduler"]["max_num_batched_tokens"] == PROFILES["h100-llama8b"].max_num_batched_tokens


def test_load_is_that_of_an_engine_that_is_busy_all_the_time(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def busy(*flags: str) -> tuple[float, float]:
        assert simulate(trace, "--json", "--policy", "fcfs", *flags) == 0
        report = json.loads(capsys.readouterr().out)["points"][0]["report"]
        return report["utilization"], report["makespan"]

    _, at_once = busy("--speed", "0")
    tenth, longest = busy("--load", "0.1")
    assert 10 * at_once < longest < 12 * at_once, "the last one comes after 10, and is served in a moment"
    assert tenth < 0.5
    assert busy("--load", "10")[0] > 0.9


def test_tenants_are_compared_with_themselves_alone(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--tenants", "1,1.5", "--speed", "10") == 0
    body = [row for row in cells(capsys.readouterr().out) if len(row) == 9][1:]
    assert [row[2:4] for row in body] == [["1", "1"], ["2", "1.5"]]
    assert sum(int(row[4]) for row in body) == 12 and int(body[0][4]) < int(body[1][4])
    assert all(float(row[8]) >= 1 for row in body)


def test_what_fits_nowhere_is_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, cache="1024,16K") == 0
    printed = capsys.readouterr().out
    head, none, all_of_them = cells(printed)
    assert head[3] == "REFUSED"
    assert none[3:6] == ["12 of 12", "–", "–/–/–/–"], "no time is better than any"
    assert all_of_them[3:5] == ["0 of 12", "69.8 %"]
    assert "Refused requests fit into no such cache, and are in no other figure." in printed
    assert simulate(trace, "--json", cache="1024") == 0
    total = json.loads(capsys.readouterr().out)["points"][0]["report"]["total"]
    assert (total["refused"], total["hit_rate"], total["ttft"]["mean"]) == (12, None, None)
    assert "context length is 1024 tokens" in total["why_refused"]
    assert simulate(trace, "--load", "1", cache="1024") == 1
    assert "fits into a cache of 1,024 tokens, so there is no load to measure" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ("16K", "8K,16K,32K"))
def test_plot_is_a_picture_of_something(trace: Path, tmp_path: Path, sizes: str) -> None:
    image = pytest.importorskip("matplotlib.image")
    assert simulate(trace, "--policy", "fcfs", "window", "--plot", str(tmp_path / "sweep.png"), cache=sizes) == 0
    pixels = image.imread(tmp_path / "sweep.png")
    height, width, _ = pixels.shape
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert height > 400 and width > 1200
    colored = (pixels[..., :3].max(axis=2) - pixels[..., :3].min(axis=2)) > 0.3
    assert all(third.sum() > 100 for third in (colored[:, i * width // 3 : (i + 1) * width // 3] for i in range(3)))


def test_without_matplotlib_nothing_is_simulated(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert simulate(trace, "--plot", "sweep.png") == 1
    printed = capsys.readouterr()
    assert printed.err == (
        "trunkline: error: --plot draws with matplotlib, which is not installed; install it with:"
        f" {sys.executable} -m pip install matplotlib\n"
    )
    assert not printed.out


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--profile", "h200"], 1, "--profile is 'h200'; allowed is one of h100-llama8b, cpu-smollm2."),
        (["--rows", "0"], 1, "--rows is 0; allowed is 1 and more."),
        (["--jobs", "0"], 1, "--jobs is 0; allowed is 1 and more."),
        (["--speed", "-1"], 1, "--speed is -1; allowed is 0 and more."),
        (["--load", "0"], 1, "--load is 0; allowed is any number above 0, and 1 is all that fcfs can serve."),
        (["--speed", "2", "--load", "1"], 2, "--load: not allowed with argument --speed"),
        (["--block-size", "0"], 1, "--block-size is 0; allowed is an integer of at least 1."),
        (["--plot", "/no/such/folder/x.png"], 1, "--plot is /no/such/folder/x.png, whose folder does not exist"),
        (["--plot", "/"], 1, "--plot is /, which is a folder; name a file in it."),
        (["--policy", "best"], 2, "--policy is 'best'; allowed is one of window, fcfs,"),
        (["--tenants", "1"], 2, "--tenants is '1'; allowed are two numbers or more above 0, such as 1,10."),
        (["--tenants", "1,x"], 2, "--tenants is '1,x'; allowed are two numbers"),
        (
            ["--cache-tokens", "1M,0"],
            2,
            "--cache-tokens is '1M,0'; allowed are numbers such as 262144 or 256K,512K,1M, up to 1G.",
        ),
        (["--cache-tokens", "2G"], 2, "--cache-tokens is '2G'; allowed are numbers such as"),
    ],
)
def test_mistakes_get_one_sentence(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, says: str
) -> None:
    try:
        ended = simulate(trace, *flags)
    except SystemExit as error:
        ended = int(str(error.code))
    printed = capsys.readouterr()
    assert ended == code
    assert says in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_bad_line_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text() + "and more\n")
    assert simulate(trace) == 1
    assert f"trunkline: error: {trace}, line 13 is no request of a trace: " in capsys.readouterr().err


def test_help_names_every_profile(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in PROFILES)

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.peers import Job, jobs, main, read_run, run_job, shortened
from benchmarks.peers_report import (
    BEGIN,
    END,
    GOALS,
    medians,
    problems,
    replace_section,
    results_table,
    section,
    targets,
    targets_table,
)
from benchmarks.server import ROOT
from tests.bench.fake_server import FakeServer
from tests.bench.test_texts import by_words
from trunkline.bench.texts import Texts
from trunkline.bench.workloads import make_workloads

TEXTS = Texts(by_words)
RUN = {
    "run": "2026-12-01T10:00:00+00:00",
    "workloads": ["W1", "W4"],
    "peers": ["trunkline", "llama-q8_0", "llama-q4_1", "vllm", "transformers"],
    "rounds": 3,
    "seed": 0,
    "serve": "",
    "smoke": False,
    "facts": {"machine": "2 cores", "python": "3.11.7"},
    "command": "benchmarks/peers.sh",
}


def make_record(
    peer: str,
    workload: str = "W1",
    *,
    round: int = 0,
    rate: float = 10.0,
    ttft: float = 100.0,
    asked: int | None = 384,
    **changes: Any,
) -> dict[str, Any]:
    summary = {
        "workload": workload,
        "title": "one stream",
        "requests": 3,
        "failures": 0,
        "first_error": None,
        "output_tokens": 384,
        "prompt_tokens": 384,
        "cached_tokens": 0,
        "output_tokens_per_second": rate,
        "ttft_ms": {"mean": ttft, "p50": ttft, "p99": ttft},
    }
    record = {"run": RUN["run"], "round": round, "peer": peer, "version": f"{peer} 1.0", "asked_tokens": asked}
    return {**record, "summary": {**summary, **changes}}


def make_rounds(peer: str, rates: tuple[float, ...], workload: str = "W1", **changes: Any) -> list[dict[str, Any]]:
    return [
        make_record(peer, workload, round=number, rate=rate, ttft=1000 / rate, **changes)
        for number, rate in enumerate(rates)
    ]


# ---------------------------------------------------------------- medians


def test_a_cell_holds_the_medians_of_its_rounds() -> None:
    records = make_rounds("trunkline", (90.0, 100.0, 50.0), valid_json=2, valid_schema=1)
    records[2]["summary"]["cached_tokens"] = 7
    (cell,) = medians(records).values()
    assert cell.rates == (90.0, 100.0, 50.0)
    assert cell.rate == 90.0
    assert cell.ttft == pytest.approx(1000 / 90)
    assert (cell.cached, cell.prompt) == (0, 384)
    assert (cell.requests, cell.failures, cell.parse, cell.valid) == (9, 0, 6, 3)


def test_a_workload_measured_twice_in_a_round_counts_once() -> None:
    records = [make_record("vllm", rate=1.0), make_record("vllm", rate=2.0)]
    assert medians(records)["W1", "vllm"].rates == (2.0,)


def test_what_was_not_measured_is_left_out_of_a_median() -> None:
    silent = make_record("vllm", round=1)
    silent["summary"]["ttft_ms"] = {"mean": None, "p50": None, "p99": None}
    assert medians([make_record("vllm", ttft=80.0), silent])["W1", "vllm"].ttft == 80.0
    assert medians([silent])["W1", "vllm"].ttft is None


# ---------------------------------------------------------------- goals


def test_goals_compare_with_the_faster_format_and_the_earlier_first_token() -> None:
    records = [
        make_record("trunkline", rate=100.0, ttft=50.0),
        make_record("llama-q8_0", rate=40.0, ttft=90.0),
        make_record("llama-q4_1", rate=50.0, ttft=120.0),
        make_record("vllm", rate=20.0, ttft=10.0),
    ]
    rate, first, vllm = targets(medians(records))
    assert (rate.against, rate.found, rate.goal, rate.reached) == ("llama.cpp Q4_1", 2.0, GOALS["W1"].llama, True)
    assert (first.against, first.theirs, first.found, first.reached) == ("llama.cpp Q8_0", 90.0, 50 / 90, True)
    assert (vllm.against, vllm.found, vllm.goal, vllm.reached) == ("vLLM float32", 5.0, GOALS["W1"].vllm, False)


@pytest.mark.parametrize(("ours", "reached"), [(1.8, True), (1.79, False)])
def test_a_ratio_that_equals_the_goal_reaches_it(ours: float, reached: bool) -> None:
    found = targets(medians([make_record("trunkline", rate=ours), make_record("llama-q8_0", rate=1.0)]))
    assert found[0].reached is reached


def test_an_equal_time_to_first_token_is_not_lower() -> None:
    found = targets(medians([make_record("trunkline"), make_record("llama-q8_0")]))
    assert found[1].what.startswith("mean TTFT") and not found[1].reached


def test_workloads_without_a_goal_or_without_ours_have_no_target() -> None:
    assert targets(medians([make_record("trunkline", "W4u"), make_record("vllm", "W4u")])) == []
    assert targets(medians([make_record("llama-q8_0")])) == []


def test_a_server_that_answered_nothing_is_no_measure() -> None:
    silent = make_record("vllm", rate=0.0, failures=3, first_error="HTTP 500")
    assert targets(medians([make_record("trunkline"), silent])) == []


# ---------------------------------------------------------------- fairness


def test_equal_runs_have_no_problems() -> None:
    assert problems([make_record(peer) for peer in ("trunkline", "llama-q8_0", "vllm")]) == []


def test_answers_of_other_lengths_are_told() -> None:
    (line,) = problems([make_record("vllm", output_tokens=380)])
    assert line.startswith("W1, vLLM float32, round 1: 380 tokens written, 384 were asked for")
    assert problems([make_record("vllm", "W4", output_tokens=380, asked=None)]) == []


def test_failures_are_told_with_their_first_error() -> None:
    (line,) = problems([make_record("vllm", failures=2, first_error="HTTP 500: no", output_tokens=128)])
    assert "2 of 3 failed" in line and "HTTP 500: no" in line


def test_prompts_counted_otherwise_are_told() -> None:
    records = [make_record("trunkline"), make_record("vllm", prompt_tokens=387)]
    assert problems(records) == ["W1, round 1: the servers count other prompt tokens: trunkline 384, vLLM float32 387"]
    records[1]["round"] = 1  # other texts: nothing to compare
    assert problems(records) == []


def test_histories_of_chats_may_differ_a_little() -> None:
    small = [make_record("trunkline", "W3", prompt_tokens=1000), make_record("vllm", "W3", prompt_tokens=1030)]
    large = [make_record("trunkline", "W3", prompt_tokens=1000), make_record("vllm", "W3", prompt_tokens=1031)]
    assert problems(small) == [] and len(problems(large)) == 1


# ---------------------------------------------------------------- tables


def full_run() -> list[dict[str, Any]]:
    transformers = make_record("transformers", rate=5.0)
    for name in ("ttft_ms", "cached_tokens", "prompt_tokens"):
        del transformers["summary"][name]
    return [
        *make_rounds("trunkline", (100.0, 110.0, 90.0)),
        *make_rounds("llama-q8_0", (40.0, 41.0, 39.0)),
        *make_rounds("llama-q4_1", (60.0, 61.0, 59.0)),
        *make_rounds("vllm", (10.0, 11.0, 9.0)),
        transformers,
    ]


def is_table(text: str) -> bool:
    return len({line.count("|") for line in text.splitlines()}) == 1


def test_the_results_table_has_a_row_for_each_server() -> None:
    table = results_table(medians(full_run()), RUN["peers"])  # type: ignore[arg-type]
    assert is_table(table)
    first, *others = table.splitlines()[2:]
    assert first.startswith("| W1: one stream | trunkline ") and "100.0 110.0 90.0" in first
    assert [line.split("|")[2].strip() for line in others] == [
        "llama.cpp Q8_0",
        "llama.cpp Q4_1",
        "vLLM float32",
        "transformers float32",
    ]
    assert others[-1].split("|")[5].strip() == "–"


def test_the_section_says_what_was_missed() -> None:
    text = section(RUN, full_run())
    assert is_table(targets_table(targets(medians(full_run()))))
    assert "Missed: W1 output tokens/s against llama.cpp Q4_1 (1.67×, ≥ 1.8×)." in text
    assert re.search(r"W1 +\| mean TTFT +\| 10 ms +\| llama.cpp Q4_1 +\| 17 ms +\| 0.60× +\| < 1× +\| yes", text)
    assert "Medians of 3 rounds" in text and "- vLLM float32: vllm 1.0" in text
    assert "W1 20.0×" in text
    assert "To be kept in mind" not in text
    assert "One round, with fresh servers" in section(RUN, [make_record("trunkline")])


def test_the_section_replaces_what_stood_between_the_marks() -> None:
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\n## Next\n"
    once = replace_section(page, "new")
    assert once == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\n## Next\n"
    assert replace_section(once, "new") == once


@pytest.mark.parametrize("page", ["# Title", f"{BEGIN}", f"{END}{BEGIN}"])
def test_a_page_without_marks_is_not_written(page: str) -> None:
    with pytest.raises(ValueError, match="two lines"):
        replace_section(page, "new")


def test_our_page_has_its_marks() -> None:
    replace_section((ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"), "new")


# ---------------------------------------------------------------- a run that broke off


def test_a_round_takes_the_servers_in_turn_and_transformers_comes_last() -> None:
    plan = jobs(RUN, [])
    assert [(job.round, job.peer) for job in plan[:5]] == [
        (0, "trunkline"),
        (0, "llama-q8_0"),
        (0, "llama-q4_1"),
        (0, "vllm"),
        (1, "trunkline"),
    ]
    assert len(plan) == 13
    assert plan[-1] == Job(0, "transformers", ("W1",))


def test_what_is_measured_is_not_measured_again() -> None:
    records = [make_record("trunkline", "W1"), make_record("trunkline", "W4"), make_record("llama-q8_0", "W1")]
    plan = jobs(RUN, records)
    assert plan[0] == Job(0, "trunkline", ("W4",))  # W4u, which goes with it, is missing
    assert plan[1] == Job(0, "llama-q8_0", ("W4",))
    records.append(make_record("trunkline", "W4u"))
    assert jobs(RUN, records)[0].peer == "llama-q8_0"


def test_the_last_run_of_a_file_is_gone_on_with(tmp_path: Path) -> None:
    results = tmp_path / "folder" / "results.jsonl"
    old = {**RUN, "run": "2026-11-01T10:00:00+00:00"}
    for row in (old, make_record("vllm") | {"run": old["run"]}, RUN, make_record("trunkline")):
        peers.append(results, row)
    run, records = read_run(results)
    assert run == RUN
    assert [record["peer"] for record in records] == ["trunkline"]


def test_nothing_to_go_on_with_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--resume", "--results", str(tmp_path / "none.jsonl"), "--peers-folder", str(tmp_path)])
    assert "no run to go on with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "--rounds", "2"], "--rounds does not go with --resume"),
        (["--rounds", "0"], "--rounds is 0; allowed is 1 or more"),
        (["--workloads", "W9"], "'W9'"),
        (["--serve", '--model "half'], "No closing quotation"),
        ([], "not installed in"),
    ],
)
def test_flags_that_make_no_sense(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*flags, "--peers-folder", str(tmp_path)])
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flags", "rounds"), [([], 3), (["--smoke"], 1), (["--smoke", "--rounds", "2"], 2)])
def test_rounds_of_a_new_run(flags: list[str], rounds: int) -> None:
    run = peers.new_run(peers.make_parser().parse_args(flags))
    assert run["rounds"] == rounds
    assert run["workloads"] == ["W1", "W2", "W3", "W4", "W5"] and run["peers"] == list(peers.PEERS)
    assert "cores" in run["facts"]["machine"]
    json.dumps(run)


def finish(results: Path, run: Mapping[str, Any], *peers_of_it: str) -> None:
    peers.append(results, run)
    for peer in peers_of_it:
        peers.append(results, make_record(peer))


def test_a_finished_run_is_written_into_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    monkeypatch.setattr(peers, "README", page)
    monkeypatch.setattr(peers, "jobs", lambda *_: [])
    monkeypatch.setattr(peers, "missing_environments", lambda *_: [])
    run = {**RUN, "workloads": list(peers.WORKLOADS), "rounds": 1}
    finish(tmp_path / "results.jsonl", run, "trunkline", "llama-q8_0", "llama-q4_1", "vllm")
    assert main(["--resume", "--peers-folder", str(tmp_path)]) == 0
    assert "| W1: one stream |" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("part", [{"workloads": ["W1"]}, {"peers": ["trunkline"]}, {"smoke": True}])
def test_a_part_of_a_run_is_not_written_into_the_page(
    part: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "README", tmp_path / "nowhere" / "README.md")
    monkeypatch.setattr(peers, "jobs", lambda *_: [])
    monkeypatch.setattr(peers, "missing_environments", lambda *_: [])
    run = {**RUN, "workloads": list(peers.WORKLOADS), "rounds": 1, **part}
    finish(tmp_path / "results.jsonl", run, "trunkline")
    assert main(["--resume", "--peers-folder", str(tmp_path)]) == 0
    assert "| W1: one stream |" in capsys.readouterr().out


def test_transformers_that_is_not_there_is_told_before_an_hour_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--peers", "transformers", "--peers-folder", str(tmp_path)])
    assert "transformers is not installed here" in capsys.readouterr().err


def test_a_server_that_does_not_start_stops_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def fake(job: Job, *_: Any) -> Any:
        measured.append(job.peer)
        if job.peer == "llama-q8_0":
            raise RuntimeError("The server did not start.")
        yield make_record(job.peer, round=job.round)

    monkeypatch.setattr(peers, "run_job", fake)
    run = {**RUN, "workloads": ["W1"], "peers": ["trunkline", "llama-q8_0", "vllm"], "rounds": 2}
    records: list[dict[str, Any]] = []
    broken = peers.carry_out(run, records, tmp_path / "results.jsonl", tmp_path)
    assert measured == ["trunkline", "llama-q8_0", "vllm"] * 2
    assert [line.partition(":")[0] for line in broken] == ["llama-q8_0, round 1", "llama-q8_0, round 2"]
    assert [job.peer for job in jobs(run, records)] == ["llama-q8_0", "llama-q8_0"]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(records) == 4


# ---------------------------------------------------------------- measuring


def test_a_smoke_workload_is_the_start_of_the_whole_one() -> None:
    (chats,) = make_workloads("W3", TEXTS, 0)
    short = shortened(chats)
    assert [len(session) for session in short.sessions] == [2, 2]
    assert short.sessions[1] == chats.sessions[1][:2]
    assert peers.asked_tokens(short) == 4 * 64
    assert peers.asked_tokens(make_workloads("W4", TEXTS, 0)[0]) is None


async def test_a_workload_is_measured_as_bench_serve_measures_it() -> None:
    (workload,) = make_workloads("W1", TEXTS, 3)
    with FakeServer() as server:
        summary, _ = await peers.measure(server.url, workload, TEXTS, 3)
    assert (summary["workload"], summary["succeeded"]) == ("W1", 3)
    assert len(server.requests) == 4  # and a warm-up
    json.dumps(summary)


def test_a_job_leaves_a_record_of_each_workload_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = [sys.executable, "-c", "import time; print('CPU : AVX2 = 1 | AVX512 = 0'); time.sleep(60)"]
    with FakeServer() as server:
        start = peers.Command(child, {}, server.url, 10.0)
        monkeypatch.setattr(peers, "command", lambda *_: start)
        monkeypatch.setattr(
            "benchmarks.server._healthy", lambda url: "AVX2" in (tmp_path / "logs" / "llama-q8_0.log").read_text()
        )
        rows = list(run_job(Job(1, "llama-q8_0", ("W1", "W4")), {**RUN, "seed": 4, "smoke": True}, TEXTS, tmp_path))
    assert [row["summary"]["workload"] for row in rows] == ["W1", "W4", "W4u"]
    assert {row["round"] for row in rows} == {1}
    assert rows[0]["asked_tokens"] == 2 * 128 and rows[1]["asked_tokens"] is None
    assert rows[0]["version"] == "xllamacpp ?, built with AVX2"
    (expected,) = make_workloads("W1", TEXTS, 5)  # the second round's seed
    assert expected.sessions[0][0].prompt in [body.get("prompt") for _, body in server.requests]


def test_environments_that_are_there_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / peers.READY).touch()
    assert main(["--missing", "--peers-folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"vllm {tmp_path / 'vllm'}\n"
    assert main(["--missing", "--peers-folder", str(tmp_path), "--peers", "trunkline", "llama-q4_1"]) == 0
    assert capsys.readouterr().out.strip() == ""


def test_vllm_is_given_the_libraries_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert peers.preloads(tmp_path)[-1] == tmp_path / "lib" / "libiomp5.so"


@pytest.mark.parametrize(("log", "mode"), [("enforce_eager=True, x", "eager"), ("a enforce_eager=False", "compiled")])
def test_vllm_is_told_compiled_or_eager(tmp_path: Path, log: str, mode: str) -> None:
    assert f", {mode}," in peers.described("vllm", tmp_path, log, "0.32.0", "")


def test_versions_are_read_from_another_environment(tmp_path: Path) -> None:
    metadata = tmp_path / "lib" / "python3.11" / "site-packages" / "some_peer-1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-peer\nVersion: 1.2\n")
    assert peers.installed(tmp_path, "some-peer") == "1.2"
    assert peers.installed(tmp_path, "another") == "?"


# ---------------------------------------------------------------- the script


def test_the_script_is_shell() -> None:
    script = ROOT / "benchmarks" / "peers.sh"
    subprocess.run(["bash", "-n", script], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, script], check=True)


@pytest.mark.slow
def test_the_script_shows_the_help_and_installs_nothing(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "peers.sh"
    done = subprocess.run(
        [script, "--peers-folder", tmp_path, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    assert "\n    benchmarks/peers.sh --resume" in done.stdout
    assert list(tmp_path.iterdir()) == []

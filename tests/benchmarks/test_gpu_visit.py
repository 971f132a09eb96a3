"""The visit's script works from end to end, as far as that can be seen without a GPU; its numbers are not judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_visit.__main__ import NEVER_MEASURED, PARTS, TOTAL_SECONDS, Part, main, run_part
from benchmarks.gpu_visit.report import Row, read_rows, to_json, to_markdown

ROOT = Path(__file__).resolve().parents[2]
MEASURED = Row(
    part="decode", what="64 × 4,096", value=3912.4, unit="GB/s", share=0.91, of="the copy", goal="≥ 85 %", met=True
)
FAILED = Row(part="decode", what="1 × 1,024", failed=True, note="RuntimeError: a | and\na line")
UNKNOWN = Row(part="tree", what="all of it", note="no time was left")
ROWS = [MEASURED, FAILED, UNKNOWN]


def rehearse(out: Path, *parts: str) -> dict[str, list[dict]]:
    """The rows of these parts, through the shell script, by part."""
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "WHEELS": str(out / "no-wheels")}
    command = [str(ROOT / "benchmarks" / "gpu_visit.sh"), "--rehearse", "--part", *parts]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "rehearsal.json").read_text())
    assert found["rehearsal"] and not (out / "visit.json").exists()
    assert all("value" not in row for row in found["rows"]), "a rehearsal's numbers look like results"
    assert "no number here is a result" in (out / "rehearsal.md").read_text()
    return {part: [row for row in found["rows"] if row["part"] == part] for part in parts}


def test_a_page_says_what_was_measured_and_what_not() -> None:
    page = to_markdown({"gpu": "H200"}, ROWS, rehearsal=False)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert ["64 × 4,096", "3,912 GB/s (91% of the copy)", "≥ 85 %", "yes", ""] in rows
    assert ["1 × 1,024", "failed", "", "", "RuntimeError: a / and a line"] in rows
    assert ["all of it", "not measured", "", "", "no time was left"] in rows
    assert "- gpu: H200" in page and page.startswith("# A GPU visit")


def test_numbers_of_a_rehearsal_are_marked() -> None:
    page = to_markdown({}, ROWS, rehearsal=True)
    assert "3,912" not in page and "yes" not in page and "rehearsed" in page and "failed" in page
    first, *_ = json.loads(to_json({}, ROWS, rehearsal=True))["rows"]
    assert "value" not in first and first["rehearsed"]["value"] == MEASURED.value
    first, *_ = json.loads(to_json({}, ROWS, rehearsal=False))["rows"]
    assert first["value"] == MEASURED.value and "rehearsed" not in first


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    whole = json.dumps({"part": "decode", "what": "whole"})
    file.write_text(f'{whole}\n{{"part": "dec')
    assert [row.what for row in read_rows(file)] == ["whole"]
    assert read_rows(tmp_path / "nothing") == []


def test_a_part_that_fails_is_a_row(tmp_path: Path) -> None:
    (row,) = run_part(Part("no_such_part", 30), [], tmp_path / "rows", dict(os.environ), 60)
    assert row.failed and "exit code 1" in row.note and "no_such_part" in row.note


def test_a_part_that_takes_too_long_is_a_row(tmp_path: Path) -> None:
    (row,) = run_part(Part("decode", 30), [], tmp_path / "rows", dict(os.environ), 0.2)
    assert row.failed and row.note == "its 0 s were over"


def test_the_visit_ends_in_time() -> None:
    assert TOTAL_SECONDS < 8 * 60
    assert all((ROOT / "benchmarks" / "gpu_visit" / f"{part.name}.py").exists() for part in PARTS)
    assert {row.part for row in NEVER_MEASURED} <= {part.name for part in PARTS}


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", "nowhere", "--part", "nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_without_a_gpu_it_says_what_can_be_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert "there is no GPU here (no nvidia-smi); --rehearse tries the script itself" in capsys.readouterr().err


@pytest.mark.slow
def test_rehearsal_of_checks(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "ceilings", "compiling", "correctness", "graphs", "sampler")
    assert all(rows for rows in found.values())
    checks = " ".join(row["what"] for row in found["correctness"])
    for kernel in (
        "rms_norm",
        "gated_mul",
        "embed",
        "apply_bitmask",
        "page copies",
        "matmul_int4 awq",
        "matmul_int8_rows",
    ):
        assert kernel in checks
    assert (
        "add_lora" in checks and "matmul_fp8" in checks and "attention" in checks and "rotate_and_store, keys" in checks
    )


@pytest.mark.real  # minutes in Triton's interpreter are for `make check`
@pytest.mark.slow
def test_rehearsal_of_measurements(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "decode", "prefill", "tree", "peers")
    assert [len(rows) for rows in found.values()] == [1, 1, 1, 4]


@pytest.mark.real  # minutes in Triton's interpreter are for `make check`
@pytest.mark.slow
def test_rehearsal_of_the_engine(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "engine_small", "engine_large")
    assert [row["what"].partition(": ")[2] for row in found["engine_small"]] == [
        "starts",
        "W1, one stream",
        "CUDA graphs and eager, greedy",
    ]
    assert found["engine_large"][-1]["what"].startswith("Llama-2-70B")

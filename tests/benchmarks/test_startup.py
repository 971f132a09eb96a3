"""The benchmark of starts: that it measures each kind, leaves nothing behind, and says why a server did not start. The numbers are not
judged here."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.server import ROOT
from benchmarks.startup import (
    Footprint,
    Memory,
    Times,
    descendants,
    main,
    memory,
    memory_table,
    server,
    surroundings,
    times_table,
)
from tests.tiny import tiny_model


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = tiny_model(tmp_path / "tiny"), tmp_path / "numbers.json"
    flags = ["--kinds", "second", "first", "--starts", "1", "--output", str(output), "--model", str(model)]
    assert main([*flags, "--max-model-len", "64"]) == 0
    assert "| second | " in capsys.readouterr().out
    results = json.loads(output.read_text())
    assert results["flags"] == ["--model", str(model), "--max-model-len", "64"]
    for kind in ("second", "first"):
        (times,) = results["times"][kind]
        assert 0 < times["listening"] < times["ready"] < times["answered"]
        footprint = results["memory"][kind]
        assert all({"API", "engine"} <= footprint[moment]["pss"].keys() for moment in ("peak", "ready", "answered"))


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no-such-model does not exist"):
        main(["--kinds", "second", "--model", "no-such-model"])


def test_no_process_is_left() -> None:
    """A server that ignores SIGTERM's cause, its child, would leave it."""
    script = "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print('here', child.pid, flush=True); child.wait()"
    with (
        pytest.raises(ZeroDivisionError),
        server([sys.executable, "-c", script], ROOT, os.environ) as (pid, lines),
    ):
        _, line = lines.until("here", time.perf_counter() + 60)
        child = int(line.split()[1])
        assert descendants(pid) == [pid, child]
        raise ZeroDivisionError
    for each in (pid, child):
        assert _has_ended(each), each


def test_processes_are_told_apart() -> None:
    script = "import sys; print('here', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, "trunkline.scheduler.process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        found = memory(os.getpid())
        child.stdin.close()
    assert {"API", "engine"} <= found.pss.keys()
    assert all(0 < found.pss[role] <= found.rss[role] for role in found.pss)


def test_no_starts_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--starts", "0"])
    assert "--starts is 0; allowed is 1 or more" in capsys.readouterr().err


def test_first_and_bare_starts_find_nothing_compiled() -> None:
    with surroundings("first") as (folder, env):
        assert not Path(env["XDG_CACHE_HOME"]).exists() and not list(folder.rglob("__pycache__"))
        assert (folder / "trunkline" / "kernels" / "build.py").samefile(folder / "kernels" / "build.py")
        assert not (folder / "kernels" / "build.py").samefile(ROOT / "kernels" / "build.py")
    assert not folder.exists()
    with surroundings("bare") as (folder, env):
        assert folder == ROOT and not Path(env["XDG_CACHE_HOME"]).exists()
        assert not Path(env["PYTHONPYCACHEPREFIX"]).exists()


def test_medians_and_moments() -> None:
    table = times_table({"second": [Times(1.0, 2.0, 3.0), Times(1.5, 9.0, 9.5), Times(0.5, 2.5, 3.5)]})
    assert table.splitlines()[2] == (
        "| second | 1.00 (0.50 – 1.50) | 2.50 (2.00 – 9.00) | 3.50 (3.00 – 9.50) | 3      |"
    )
    moments = [Memory({"API": size, "engine": 4 * size}, {}) for size in (50_000_000, 10_000_000, 20_000_000)]
    assert memory_table({"first": Footprint(*moments)}).splitlines()[2].split(" | ")[1:] == [
        "250 (engine 200, API 50)",
        "50 (engine 40, API 10)",
        "100 (engine 80, API 20) |",
    ]


def _has_ended(pid: int) -> bool:
    """A process that nobody has waited for yet is there as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

"""The visit: part after part, each with its own time, and what they found as one JSON file and one page.

    python -m benchmarks.gpu_visit --out FOLDER                # on a GPU; gpu_visit.sh calls this
    python -m benchmarks.gpu_visit --out FOLDER --rehearse     # on a CPU, tiny, in Triton's interpreter: does the script work?
    python -m benchmarks.gpu_visit --out FOLDER --part decode tree

A part that fails or runs out of time is a row; the others go on.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_visit.report import Row, read_rows, to_json, to_markdown

ROOT = Path(__file__).resolve().parents[2]
LEAST_SECONDS = 10  # with less, a part is not begun
VERSIONS = ("torch", "triton", "numpy", "transformers", "xgrammar", "trunkline")


class Part(NamedTuple):
    """A module of this folder, and the seconds that it may take."""

    name: str
    seconds: int


PARTS = (
    Part("ceilings", 30),
    Part("compiling", 90),
    Part("correctness", 75),
    Part("decode", 40),
    Part("prefill", 40),
    Part("tree", 40),
    Part("graphs", 30),
    Part("sampler", 20),
    Part("engine_small", 75),
    Part("engine_large", 130),
    Part("peers", 60),
)
TOTAL_SECONDS = 460
REHEARSAL_SECONDS = 600  # of a part, and of all: an interpreter on a busy machine

NEVER_MEASURED = (
    Row(part="engine_large", what="Llama-2-70B, tensor parallel 4", note="takes four GPUs; a visit has one"),
)


def facts(*, rehearsal: bool, seed: int) -> dict[str, Any]:
    """Where and when."""
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "seed": seed}
    found["python"] = platform.python_version()
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if not rehearsal:
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip() or "none"
    return found


def run_part(part: Part, arguments: list[str], rows: Path, environment: dict[str, str], seconds: float) -> list[Row]:
    """Run a part to its end, or until its time is over. Returns its rows, and one more if it did not end well."""
    print(f"== {part.name}, at most {seconds:.0f} s", flush=True)
    started = time.monotonic()
    errors = rows.with_suffix(".errors")
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_visit.part", part.name, "--rows", str(rows), *arguments],
            cwd=ROOT,
            env=environment,
            stderr=file,
            start_new_session=True,  # so that what it starts, a server, ends with it
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    found = read_rows(rows)
    took = f"took {time.monotonic() - started:.0f} s"
    if status is None:
        found.append(Row(part=part.name, what="the rest", failed=True, note=f"its {seconds:.0f} s were over"))
    elif status:
        last = (errors.read_text().strip().splitlines() or ["no message"])[-1]
        found.append(
            Row(part=part.name, what="the rest", failed=True, note=f"exit code {status}, {took}: {last[:300]}")
        )
    print(f"   {took}", flush=True)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever the part has started and left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(argv: list[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_visit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="is made if it is not there")
    parser.add_argument(
        "--part", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU; its numbers are no results")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), metavar="N", help="(a fresh one)")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if not args.rehearse and shutil.which("nvidia-smi") is None:
        parser.error("there is no GPU here (no nvidia-smi); --rehearse tries the script itself on a CPU")
    if args.rehearse:
        environment["TRITON_INTERPRET"] = "1"
    name = "rehearsal" if args.rehearse else "visit"
    where = facts(rehearsal=args.rehearse, seed=args.seed)
    deadline = time.monotonic() + (REHEARSAL_SECONDS if args.rehearse else TOTAL_SECONDS)
    rows: list[Row] = []
    ceilings: dict[str, float] = {}
    for part in (part for part in PARTS if part.name in args.part):
        left = deadline - time.monotonic()
        seconds = min(REHEARSAL_SECONDS if args.rehearse else part.seconds, left)
        if left < LEAST_SECONDS:
            rows.append(Row(part=part.name, what="all of it", note="no time was left"))
            continue
        file = args.out / f"{name}-{part.name}.rows"
        file.unlink(missing_ok=True)
        arguments = ["--ceilings", json.dumps(ceilings), "--seed", str(args.seed), *["--rehearse"] * args.rehearse]
        found = run_part(part, arguments, file, environment, seconds)
        if part.name == "ceilings":
            ceilings = {row.what: row.value * 1e9 for row in found if row.value is not None}
        rows += [*found, *(row for row in NEVER_MEASURED if row.part == part.name)]
        # After each part, so that a visit that is cut short leaves what it has.
        (args.out / f"{name}.json").write_text(to_json(where, rows, rehearsal=args.rehearse), encoding="utf-8")
        (args.out / f"{name}.md").write_text(to_markdown(where, rows, rehearsal=args.rehearse), encoding="utf-8")
        file.unlink(missing_ok=True)
        file.with_suffix(".errors").unlink(missing_ok=True)
    failed = [row for row in rows if row.failed]
    print(f"{len(rows)} rows, {len(failed)} failed; {args.out / name}.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Our server beside those of others, in one run on one machine: the same weights, prompts, seeds, threads and client.

    benchmarks/peers.sh --smoke                    # installs the servers, then a few requests of each workload on each
    benchmarks/peers.sh                            # all of it, written into README.md: an hour on two quiet cores
    benchmarks/peers.sh --resume                   # go on with a run that broke off
    benchmarks/peers.sh --workloads W1 W5 --peers trunkline llama-q8_0 --rounds 1

trunkline     `trunkline serve` as it is without flags (--serve adds some)
llama-q8_0, llama-q4_1   llama.cpp's server: 8 slots of 3,072 tokens
vllm          vLLM's CPU build in float32, with its prefix cache and 8 sequences
transformers  `generate` in float32, the first requests of W1 and W2, once

A round takes the servers in turn: a fresh one, all workloads, stop. Nothing is cached from before, a machine that slows down slows
all, and the texts of a round are those of a seed of its own, the same for all. What is measured is kept as it comes, in
--results; the tables hold the medians of the rounds. The client is that of `trunkline bench serve`.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peer_models
from benchmarks.json_lines import read_rows
from benchmarks.peers_report import (
    LLAMAS,
    OURS,
    TRANSFORMERS,
    VLLM,
    replace_section,
    section,
)
from benchmarks.server import ROOT, launch
from trunkline.bench import cli
from trunkline.bench.report import platform_facts, summarize
from trunkline.bench.runner import Server
from trunkline.bench.texts import Texts
from trunkline.bench.workloads import Turn, Workload, make_workloads, warm_up
from trunkline.errors import ConfigError, StartupError

PEERS = (OURS, *LLAMAS, VLLM, TRANSFORMERS)
WORKLOADS = cli.WORKLOADS_WITHOUT_CROWD
ENVIRONMENTS = {LLAMAS[0]: "llama", LLAMAS[1]: "llama", VLLM: "vllm"}  # the folders that peers.sh makes
READY = "installed"  # a file there, written when all of it is
README = ROOT / "benchmarks" / "README.md"

SLOTS = 8  # requests at a time, as the workloads send them
SLOT_TOKENS = 3072  # prompt and answer
VLLM_KV_BYTES = 2 << 30  # nearly twice what eight full slots take in float32
VLLM_START_SECONDS = 900  # it compiles the model
TRANSFORMERS_WORKLOADS = ("W1", "W2")
TRANSFORMERS_REQUESTS = 8
SMOKE_SESSIONS, SMOKE_TURNS = 2, 2


class Command(NamedTuple):
    """How to start a server.

    words, env       the command line and the variables it needs besides
    url              where it listens; None: it prints that
    start_seconds    it may take
    """

    words: list[str]
    env: Mapping[str, str]
    url: str | None
    start_seconds: float


class Job(NamedTuple):
    """What a server is started for: the workloads that a round still lacks of it."""

    round: int
    peer: str
    names: tuple[str, ...]


def say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- servers


def command(peer: str, folder: Path, serve: str) -> Command:
    """The command line of a server, on a free port. Writes the model files that it needs."""
    if peer == OURS:
        words = [sys.executable, "-m", "trunkline", "serve", "--host", "127.0.0.1", "--port", "0", *shlex.split(serve)]
        return Command(words, {}, None, 120)
    files = peer_models.prepare(folder / "models")
    environment = folder / ENVIRONMENTS[peer]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    python = str(environment / "bin" / "python")
    cpus = sorted(os.sched_getaffinity(0))
    if peer in LLAMAS:
        model = files.q8_0 if peer == LLAMAS[0] else files.q4_1
        sizes = ["--slots", f"{SLOTS}", "--slot-tokens", f"{SLOT_TOKENS}", "--threads", f"{len(cpus)}"]
        return Command([python, "benchmarks/llama_server.py", str(model), f"{port}", *sizes], {}, url, 120)
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(files.hugging_face)]
    words += ["--host", "127.0.0.1", "--port", f"{port}", "--dtype", "float32", "--max-model-len", f"{SLOT_TOKENS}"]
    words += ["--max-num-seqs", f"{SLOTS}", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    words += ["--kv-cache-memory-bytes", f"{VLLM_KV_BYTES}"]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),  # by itself it would leave a core to its scheduler
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, preloads(environment))),
    }
    return Command(words, env, url, VLLM_START_SECONDS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def preloads(environment: Path) -> list[Path]:
    """What vLLM's manual wants loaded first on x86: tcmalloc if the machine has it, and Intel's OpenMP."""
    libraries = (Path(folder) for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"))
    found = [file for folder in libraries if (file := folder / "libtcmalloc_minimal.so.4").exists()][:1]
    return [*found, *sorted((environment / "lib").glob("libiomp5.so"))]


def described(peer: str, folder: Path, log: str, version: str | None, serve: str) -> str:
    """The server's version, and how it runs: from its environment and from what it printed at start."""
    if peer == OURS:
        started = re.search(r"(?m)^Trunkline (.*)$", log)
        return (started[1] if started else version or "?") + (f", flags {serve}" if serve else "")
    if peer in LLAMAS:
        found = re.search(r"(?m)^CPU : (.*)$", log)
        features = re.findall(r"(\w+) = 1", found[1]) if found else []
        return f"xllamacpp {installed(folder / 'llama', 'xllamacpp')}, built with {' '.join(features)}"
    eager = re.search(r"enforce_eager=(True|False)", log)
    mode = {"True": "eager", "False": "compiled"}.get(eager[1] if eager else "", "compiled or eager: it does not say")
    torch = installed(folder / "vllm", "torch")
    preloaded = [file.name.partition(".")[0] for file in preloads(folder / "vllm")]
    return f"vllm-cpu {installed(folder / 'vllm', 'vllm-cpu')}, {mode}, torch {torch}, with {' and '.join(preloaded) or 'no preloads'}"


def installed(environment: Path, package: str) -> str:
    """The version of a package in another environment."""
    paths = [str(path) for path in environment.glob("lib/python*/site-packages")]
    return next((found.version for found in importlib.metadata.distributions(name=package, path=paths)), "?")


# ---------------------------------------------------------------- measuring


def shortened(workload: Workload) -> Workload:
    """A workload's first sessions and turns, to see that all works."""
    sessions = tuple(session[:SMOKE_TURNS] for session in workload.sessions[:SMOKE_SESSIONS])
    return dataclasses.replace(workload, sessions=sessions)


def workloads_of(name: str, texts: Texts, seed: int, *, smoke: bool) -> list[Workload]:
    found = make_workloads(name, texts, seed)
    return [shortened(workload) for workload in found] if smoke else list(found)


async def measure(url: str, workload: Workload, texts: Texts, seed: int) -> tuple[dict[str, Any], str | None]:
    """What `trunkline bench serve` reports of one workload, and the server's version if it tells."""
    async with Server(url) as server:
        model = await server.model()
        await server.run(warm_up(workload, texts, seed, 1), model)
        return summarize(await server.run(workload, model)), await server.version()


def asked_tokens(workload: Workload) -> int | None:
    """Tokens that every server must write in all, or None if an answer may end before its limit."""
    turns = [turn for session in workload.sessions for turn in session]
    return sum(turn.max_tokens for turn in turns) if all(turn.ignore_eos for turn in turns) else None


def run_job(job: Job, run: Mapping[str, Any], texts: Texts, folder: Path) -> Generator[dict[str, Any], None, None]:
    """Start a server, run its workloads, stop it. Yields a record of each workload as soon as it is measured.

    Raises RuntimeError, with the server's last lines, if it does not start.
    """
    seed = run["seed"] + job.round
    start = command(job.peer, folder, run["serve"])
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    file = logs / f"{job.peer}.log"
    began = time.perf_counter()
    with (
        file.open("w", buffering=1, encoding="utf-8") as log,
        launch(start.words, url=start.url, env=start.env, log=log, start_seconds=start.start_seconds) as server,
    ):
        say(f"{job.peer}: ready after {time.perf_counter() - began:.0f} s; log: {file}")
        for name in job.names:
            for workload in workloads_of(name, texts, seed, smoke=run["smoke"]):
                summary, version = asyncio.run(measure(server.url, workload, texts, seed))
                say(f"  {workload.name}: {summary['output_tokens_per_second']} tokens/s, {summary['failures']} failed")
                text = file.read_text(encoding="utf-8", errors="replace")
                yield record(run, job, summary, described(job.peer, folder, text, version, run["serve"]), workload)


def record(
    run: Mapping[str, Any], job: Job, summary: dict[str, Any], version: str, workload: Workload | None
) -> dict[str, Any]:
    return {
        "run": run["run"],
        "round": job.round,
        "peer": job.peer,
        "version": version,
        "asked_tokens": None if workload is None else asked_tokens(workload),
        "summary": summary,
    }


def run_transformers(job: Job, run: Mapping[str, Any], texts: Texts) -> Generator[dict[str, Any], None, None]:
    """The same of `transformers.generate`, in a process of its own, which has torch and the model to itself."""
    context = multiprocessing.get_context("spawn")
    version = f"{importlib.metadata.version('transformers')}, torch {importlib.metadata.version('torch')}"
    most = 1 if run["smoke"] else TRANSFORMERS_REQUESTS
    for name in job.names:
        (workload,) = workloads_of(name, texts, run["seed"], smoke=run["smoke"])
        turns = [session[0] for session in workload.sessions][:most]
        warm = warm_up(workload, texts, run["seed"], 1).sessions[0][0]
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            tokens, seconds = pool.submit(generate, warm, turns).result()
        summary = {
            "workload": workload.name,
            "title": workload.title,
            "requests": len(turns),
            "failures": 0,
            "output_tokens": tokens,
            "wall_seconds": round(seconds, 3),
            "output_tokens_per_second": round(tokens / seconds, 2),
        }
        say(f"  {workload.name}: {summary['output_tokens_per_second']} tokens/s")
        yield record(run, job, summary, version, None)


def generate(warm: Turn, turns: Sequence[Turn]) -> tuple[int, float]:
    """Tokens written and seconds taken, one request after another, after one that is not counted."""
    from benchmarks.against_transformers import Peer, peer_speed

    peer = Peer()
    peer.generate(warm)
    return peer_speed(peer, list(turns))


# ---------------------------------------------------------------- a run and its records


def new_run(args: argparse.Namespace) -> dict[str, Any]:
    """The first line of a run in the results file: all that is needed to go on with it. Raises ValueError for flags that can't be."""
    shlex.split(args.serve or "")
    return {
        "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workloads": list(cli.selected(args.workloads or WORKLOADS)),
        "peers": [peer for peer in PEERS if peer in (args.peers or PEERS)],
        "rounds": args.rounds or (1 if args.smoke else 3),
        "seed": args.seed or 0,
        "serve": args.serve or "",
        "smoke": args.smoke,
        "facts": {**platform_facts(), "machine": machine()},
        "command": shlex.join(["benchmarks/peers.sh", *sys.argv[1:]]),
    }


def is_whole(run: Mapping[str, Any]) -> bool:
    """It can take the place of the page's tables: nobody is left out, nor any workload."""
    return not run["smoke"] and set(run["peers"]) == set(PEERS) and set(run["workloads"]) >= set(WORKLOADS)


def machine() -> str:
    """ "2 cores of AMD EPYC 7763 (AVX2), 23 GiB", from Linux's own files; shorter elsewhere."""
    cores = len(os.sched_getaffinity(0))
    try:
        facts = Path("/proc/cpuinfo").read_text()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except OSError:
        return f"{cores} cores of {platform.machine()}"
    name = re.search(r"(?m)^model name\s*: (.*)$", facts)
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_vnni|amx_int8)\b", facts))
    wide = ", ".join(sorted(flag.upper() for flag in flags)) or "no AVX2"
    return f"{cores} cores of {name[1] if name else platform.machine()} ({wide}), {memory:.0f} GiB"


def read_run(results: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last run in the results file and what it has measured. Raises ValueError if there is none."""
    rows = read_rows(results) if results.exists() else []
    runs = [row for row in rows if "facts" in row]
    if not runs:
        raise ValueError(f"{results} holds no run to go on with; start one without --resume.")
    return runs[-1], [row for row in rows if "summary" in row and row["run"] == runs[-1]["run"]]


def append(results: Path, row: Mapping[str, Any]) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def jobs(run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Job]:
    """What is still to be done, the servers in turn; transformers, which runs once, comes last."""
    done = {(row["round"], row["peer"], row["summary"]["workload"]) for row in records}

    def missing(number: int, peer: str, names: Sequence[str]) -> tuple[str, ...]:
        parts = {"W4": ("W4", "W4u")}  # they are measured together
        return tuple(
            name for name in names if not all((number, peer, part) in done for part in parts.get(name, (name,)))
        )

    servers = [peer for peer in run["peers"] if peer != TRANSFORMERS]
    found = [
        Job(number, peer, missing(number, peer, run["workloads"]))
        for number in range(run["rounds"])
        for peer in servers
    ]
    if TRANSFORMERS in run["peers"]:
        names = [name for name in run["workloads"] if name in TRANSFORMERS_WORKLOADS]
        found.append(Job(0, TRANSFORMERS, missing(0, TRANSFORMERS, names)))
    return [job for job in found if job.names]


def carry_out(run: Mapping[str, Any], records: list[dict[str, Any]], results: Path, folder: Path) -> list[str]:
    """Do what is still to be done, adding to `records` and the file. Returns what went wrong; the rest goes on."""
    texts = cli.make_texts(None)
    broken = []
    for job in jobs(run, records):
        say(f"round {job.round + 1} of {run['rounds']}, {job.peer}: {' '.join(job.names)}")
        measured = run_transformers(job, run, texts) if job.peer == TRANSFORMERS else run_job(job, run, texts, folder)
        try:
            with contextlib.closing(measured):
                for row in measured:
                    append(results, row)
                    records.append(row)
        except (RuntimeError, OSError, StartupError) as error:
            broken.append(f"{job.peer}, round {job.round + 1}: {error}")
            say(broken[-1])
    return broken


# ---------------------------------------------------------------- the command


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "trunkline" / "peers"


def missing_environments(peers: Sequence[str], folder: Path) -> list[str]:
    """Names of the environments that these peers need and that are not installed."""
    needed = dict.fromkeys(ENVIRONMENTS[peer] for peer in peers if peer in ENVIRONMENTS)
    return [name for name in needed if not (folder / name / READY).exists()]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/peers.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", nargs="+", metavar="W", help=f"of {' '.join(WORKLOADS)} (default: all); W4 brings W4u along"
    )
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, metavar="NAME", help=f"of {' '.join(PEERS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="(default: 3, or 1 with --smoke)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the first round's texts; each later one adds 1 (default: 0)"
    )
    parser.add_argument("--serve", metavar="FLAGS", help="flags for `trunkline serve`, in quotes")
    parser.add_argument("--smoke", action="store_true", help="two requests of each workload, printed only")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the last run of the results file, with its flags"
    )
    parser.add_argument("--peers-folder", type=Path, metavar="FOLDER", default=default_folder(), help="(%(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines (FOLDER/results.jsonl)")
    parser.add_argument("--missing", action="store_true", help=argparse.SUPPRESS)  # for peers.sh
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    folder = args.peers_folder.expanduser().resolve()
    results = args.results or folder / "results.jsonl"
    records: list[dict[str, Any]] = []
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; allowed is 1 or more")
    try:
        if args.resume:
            own = ("workloads", "peers", "rounds", "seed", "serve", "smoke")
            given = [f"--{name}" for name in own if getattr(args, name) not in (None, False)]
            if given:
                parser.error(f"{given[0]} does not go with --resume, which takes the flags of the run that broke off")
            run, records = read_run(results)
        else:
            run = new_run(args)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    lacking = missing_environments(run["peers"], folder)
    if args.missing:
        print("\n".join(f"{name} {folder / name}" for name in lacking))
        return 0
    if lacking:
        parser.error(f"not installed in {folder}: {', '.join(lacking)}; benchmarks/peers.sh installs them")
    if TRANSFORMERS in run["peers"] and importlib.util.find_spec(TRANSFORMERS) is None:
        parser.error("transformers is not installed here; `make test-fast` once does that, and --peers leaves it out")
    if not args.resume:
        append(results, run)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are stopped
    broken = carry_out(run, records, results, folder)
    text = section(run, records)
    print(text)
    if is_whole(run) and not broken:
        README.write_text(replace_section(README.read_text(encoding="utf-8"), text), encoding="utf-8")
        say(f"Written into {README}.")
    for line in broken:
        say(f"Not measured: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

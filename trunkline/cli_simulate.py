"""`trunkline simulate`: its flags, and what it prints. The work is done in sweep.py, imported when it is needed."""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trunkline.bench.output_file import check_output
from trunkline.bench.tables import NONE
from trunkline.cli_engine import POLICY_HELP, add_engine_flags
from trunkline.config import POLICIES, SchedulerConfig, engine_config
from trunkline.errors import ConfigError, shown
from trunkline.units import format_bytes

if TYPE_CHECKING:
    from trunkline.scheduler.simulator import Spread
    from trunkline.sweep import Point, Scenario
    from trunkline.traces import TraceRow

COLUMNS = (
    *("policy", "cache", "memory", "hit rate", "TTFT s mean/p50/p99/max", "ms/token", "longest gap s"),
    *("steps", "preempted", "makespan s", "busy"),
)
TENANT_COLUMNS = (
    "policy",
    "cache",
    "tenant",
    "weight",
    "requests",
    "hit rate",
    "TTFT s mean/p50/p99/max",
    "alone",
    "times alone",
)
MAX_CACHE_TOKENS = 2**30  # the simulation itself has to keep account of them in memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline simulate`, on a parser of the caller's."""
    scheduler = SchedulerConfig()

    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--trace",
        metavar="FILE",
        required=True,
        help="JSON lines in Mooncake's format; a sample is benchmarks/sample_trace.jsonl",
    )
    group.add_argument("--rows", type=int, metavar="N", help="only the first requests of it (default: all)")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--speed",
        type=float,
        metavar="X",
        default=1.0,
        help="requests come X times as fast as recorded; 0: all at once",
    )
    pace.add_argument(
        "--load",
        type=float,
        metavar="L",
        help="requests come at L times the rate that fcfs can serve with the smallest cache (it is measured first)",
    )
    group.add_argument(
        "--tenants",
        type=_numbers,
        metavar="W,W[,…]",
        help="deal the requests out to tenants by these weights: 1,10 is one and another that sends ten times as much;"
        " each is also simulated alone (default: one tenant)",
    )

    group = parser.add_argument_group("machine")
    group.add_argument(
        "--profile", metavar="NAME", default="h100-llama8b", help="what a step costs: h100-llama8b or cpu-smollm2"
    )
    group.add_argument(
        "--cache-tokens",
        type=_counts,
        metavar="N[,N…]",
        required=True,
        help="tokens of KV that fit into memory, such as 262144 or 256K,512K,1M: each is simulated",
    )

    group = parser.add_argument_group("engine")
    group.add_argument(
        "--policy",
        nargs="+",
        choices=POLICIES,
        metavar="NAME",
        help=f"{POLICY_HELP}. Each that is named is simulated (default: {scheduler.policy})",
    )
    group.add_argument(
        "--window-seconds",
        type=float,
        metavar="W",
        default=scheduler.window_seconds,
        help="window: nobody is overtaken by those who came so much later; in every policy: for how long small requests may"
        " pass one that does not fit",
    )
    group.add_argument(
        "--window-gamma",
        type=float,
        metavar="G",
        default=scheduler.window_gamma,
        help="window: a second of reading counts as G seconds of waiting, up to W",
    )
    add_engine_flags(group, "--max-num-seqs")
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="tokens in one step (default: the profile's)"
    )
    add_engine_flags(group, "--target-token-seconds", "--fairness", "--block-size", "--eviction-policy")

    group = parser.add_argument_group("output")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw hit rate and TTFT against the cache's size")
    group.add_argument("--json", action="store_true", help="print every number as JSON instead of the tables")
    group.add_argument("--jobs", type=int, metavar="N", default=1, help="simulations at a time, a process each")


def run(args: argparse.Namespace) -> int:
    """Simulate what the flags ask for. Raises StartupError, a sentence for the user, if they make no sense."""
    from trunkline.sweep import load_rows, speed_for_load, sweep

    _check(args)
    scenario = _scenario(args)
    rows = load_rows(scenario)
    if args.load is not None:
        scenario = replace(scenario, speed=speed_for_load(scenario, args.load, min(args.cache_tokens)))
    head = _describe(scenario, rows, args.load)
    if not args.json:
        print(head, flush=True)  # the simulations take their time
    points = sweep(
        scenario,
        policies=tuple(dict.fromkeys(args.policy or [scenario.scheduler.policy])),
        cache_sizes=sorted(set(args.cache_tokens)),
        jobs=args.jobs,
        on_point=_tell,
    )
    if args.json:
        found = msgspec.json.encode(_numbers_of(scenario, points, args.load))  # NaN is null
        print(msgspec.json.format(found, indent=1).decode())
    else:
        print(f"\n{table(points, scenario.profile)}")
        if scenario.tenants:
            print(f"\n{tenant_table(points, scenario.tenants)}")
    if args.plot is not None:
        from trunkline.plots import draw_sweep

        draw_sweep(points, args.plot, title=head)
    return 0


def table(points: Sequence["Point"], profile_name: str) -> str:
    """A line for each point of a sweep."""
    from trunkline.bench.tables import align
    from trunkline.scheduler.cost_model import profile

    cost = profile(profile_name)
    refused = any(point.report.total.refused for point in points)
    rows: list[Sequence[str]] = [(*COLUMNS[:3], "REFUSED", *COLUMNS[3:]) if refused else COLUMNS]
    for point in points:
        report, total = point.report, point.report.total
        rows.append(
            (
                point.policy,
                f"{point.cache_tokens:,}",
                format_bytes(point.cache_tokens * cost.kv_bytes_per_token),
                *((f"{total.refused:,} of {total.refused + total.finished:,}",) if refused else ()),
                _percent(total.hit_rate),
                _four(total.ttft),
                f"{1000 * total.token_seconds:.1f}",
                f"{total.longest_gap:.2f}",
                f"{report.steps:,}",
                f"{report.preemptions:,}",
                f"{report.makespan:.1f}",
                f"{100 * report.utilization:.0f} %",
            )
        )
    return align(rows) + ("\nRefused requests fit into no such cache, and are in no other figure." if refused else "")


def tenant_table(points: Sequence["Point"], weights: Sequence[float]) -> str:
    """A line for each tenant of each point, in the order of their weights on the command line."""
    from trunkline.bench.tables import align

    rows: list[Sequence[str]] = [TENANT_COLUMNS]
    for point in points:
        for tenant, summary in sorted(point.report.tenants.items(), key=lambda item: int(item[0])):
            alone = point.alone[tenant].mean
            rows.append(
                (
                    point.policy,
                    f"{point.cache_tokens:,}",
                    tenant,
                    f"{weights[int(tenant) - 1]:g}",
                    f"{summary.finished:,}",
                    _percent(summary.hit_rate),
                    _four(summary.ttft),
                    _number(alone),
                    _number(summary.ttft.mean / alone if alone else math.nan),
                )
            )
    return align(rows)


def _scenario(args: argparse.Namespace) -> "Scenario":
    from trunkline.scheduler.cost_model import profile
    from trunkline.sweep import Scenario

    cost = profile(args.profile)
    engine = engine_config(
        "simulated",
        block_size=args.block_size,
        eviction_policy=args.eviction_policy,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or cost.max_num_batched_tokens,
        target_token_seconds=args.target_token_seconds,
        fairness=args.fairness,
    )
    window = {"window_seconds": args.window_seconds, "window_gamma": args.window_gamma}
    return Scenario(
        trace=args.trace,
        profile=args.profile,
        rows=args.rows,
        speed=args.speed,
        tenants=args.tenants or (),
        cache=engine.cache,
        scheduler=msgspec.structs.replace(engine.scheduler, **window),
    )


def _check(args: argparse.Namespace) -> None:
    """What no other place looks at."""
    for flag in ("rows", "jobs", "max_num_batched_tokens"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; allowed is 1 and more.")
    for flag in ("speed", "window_seconds", "window_gamma"):
        if not 0 <= getattr(args, flag) < math.inf:
            raise ConfigError(f"--{flag.replace('_', '-')} is {getattr(args, flag):g}; allowed is 0 and more.")
    if args.load is not None and not 0 < args.load < math.inf:
        raise ConfigError(f"--load is {args.load:g}; allowed is any number above 0, and 1 is all that fcfs can serve.")
    if args.plot is not None:
        from trunkline.plots import check_matplotlib

        check_output("--plot", args.plot)
        check_matplotlib("--plot")


def _describe(scenario: "Scenario", rows: Sequence["TraceRow"], load: float | None) -> str:
    """The traffic in one line."""
    prompt = sum(row.num_prompt for row in rows)
    output = sum(row.num_output for row in rows)
    name = Path(scenario.trace).name
    if scenario.speed == 0:
        pace = "all at once"
    else:
        seconds = max(0.0, rows[-1].arrival - rows[0].arrival) / scenario.speed
        pace = f"in {seconds:,.1f} s" + (f", load {load:g}" if load is not None else "")
    return f"{name} on {scenario.profile}: {len(rows):,} requests {pace}, {prompt:,} tokens in, {output:,} out"


def _tell(point: "Point") -> None:
    print(
        f"{point.policy}, {point.cache_tokens:,} tokens:"
        f" simulated {point.report.makespan:,.0f} s in {point.cpu_seconds:.1f} s",
        file=sys.stderr,
    )


def _numbers_of(scenario: "Scenario", points: Sequence["Point"], load: float | None) -> dict[str, Any]:
    shown_scenario = {**msgspec.to_builtins(scenario), "trace": Path(scenario.trace).name, "load": load}
    del shown_scenario["scheduler"]["policy"]  # each point has its own
    return {"scenario": shown_scenario, "points": msgspec.to_builtins(points)}


def _four(seconds: "Spread") -> str:
    return "/".join(map(_number, (seconds.mean, seconds.p50, seconds.p99, seconds.max)))


def _number(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.2f}"


def _percent(share: float) -> str:
    return NONE if math.isnan(share) else f"{100 * share:.1f} %"


def _counts(text: str) -> list[int]:
    """ "256K,1M" is [262144, 1048576]."""
    counts = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,15})([kmg]?)", word.strip().lower())
        count = int(match[1]) * 1024 ** " kmg".index(match[2] or " ") if match is not None else 0
        if not 1 <= count <= MAX_CACHE_TOKENS:
            raise argparse.ArgumentTypeError(
                f"is {shown(text)}; allowed are numbers such as 262144 or 256K,512K,1M, up to 1G."
            )
        counts.append(count)
    return counts


def _numbers(text: str) -> tuple[float, ...]:
    """ "1,10" is (1.0, 10.0)."""
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) < 2 or not all(0 < weight < math.inf for weight in weights):
        raise argparse.ArgumentTypeError(f"is {shown(text)}; allowed are two numbers or more above 0, such as 1,10.")
    return weights

"""`trunkline bench serve` with a load in place of the workloads: its flags, and running it."""

import argparse
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from trunkline.config import API_KEY_VARIABLE
from trunkline.errors import ConfigError, shown

if TYPE_CHECKING:
    from trunkline.bench.load import Shape

# As in load.DATASETS and load_report.METRICS, which are not imported before there is something to do.
DATASETS = ("random", "prefix_repetition", "trace", "custom")
METRICS = ("ttft", "tpot", "itl", "e2el")
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
DEFAULT_PROMPTS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a load, named as in vLLM's `bench serve`."""
    group = parser.add_argument_group("load", "In place of workloads: prompts of a kind that come at a rate.")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        help="random: one prefix for all, then tokens of their own; prefix_repetition: several prefixes; trace: recorded traffic in"
        " Mooncake's format; custom: JSON lines with a prompt each (default: random, if another flag of a load is given)",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="of trace and custom")
    group.add_argument("--num-prompts", type=int, metavar="N", help=f"requests (default: {DEFAULT_PROMPTS})")
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests a second (default: inf, all at once; of a trace: as recorded)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        default=1.0,
        help="of when they come. 1: by chance (a Poisson process); less: in bursts; more: evenly",
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests under way at a time (default: no limit)"
    )
    group.add_argument(
        "--input-len", "--random-input-len", type=int, metavar="TOKENS", default=1024, help="of a prompt's own"
    )
    group.add_argument(
        "--output-len", "--random-output-len", type=int, metavar="TOKENS", default=128, help="to be written"
    )
    group.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        type=int,
        metavar="TOKENS",
        default=0,
        help="that prompts share, before their own",
    )
    group.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=float,
        metavar="SHARE",
        default=0.0,
        help="by which lengths vary, 0 to 1",
    )
    group.add_argument(
        "--num-prefixes",
        "--prefix-repetition-num-prefixes",
        type=int,
        metavar="N",
        default=10,
        help="different ones, of prefix_repetition",
    )
    group.add_argument("--speed", type=float, metavar="X", help="of a trace: X times as fast as recorded (default: 1)")
    group.add_argument(
        "--block-tokens",
        type=int,
        metavar="N",
        help="of a trace: tokens of a block; less makes all prompts and answers shorter (default: as recorded)",
    )
    group.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="where prompts are sent")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write all tokens that were asked for, also behind an end of text",
    )
    group.add_argument(
        "--percentile-metrics",
        metavar="M[,M…]",
        default="ttft,tpot,itl",
        help=f"what the table shows, of {', '.join(METRICS)}; the JSON has all",
    )
    group.add_argument("--metric-percentiles", metavar="P[,P…]", default="90,99", help="besides mean and median")
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="M:MS",
        help="count requests that keep to these times: ttft:500 tpot:50, in milliseconds",
    )
    parser.set_defaults(load_defaults={action.dest: action.default for action in group._group_actions})


def is_load(args: argparse.Namespace) -> bool:
    """True if the flags ask for a load, not for workloads. Raises ConfigError if they ask for both."""
    wanted = [
        f"--{dest.replace('_', '-')}" for dest, default in args.load_defaults.items() if getattr(args, dest) != default
    ]
    if wanted and args.workload is not None:
        raise ConfigError(f"--workload and {wanted[0]} are two ways to say what is sent; leave one of them out.")
    return bool(wanted)


def run_load(args: argparse.Namespace) -> dict[str, Any]:
    """Send the load, and print what came of it. Returns every number. Raises StartupError as cli.run does."""
    import asyncio

    shape = _shape(args)
    metrics, percentiles, goodput = (
        _metrics(args.percentile_metrics),
        _percentiles(args.metric_percentiles),
        _goodput(args.goodput),
    )
    return asyncio.run(_measure(args, shape, metrics, percentiles, goodput))


async def _measure(
    args: argparse.Namespace, shape: "Shape", metrics: list[str], percentiles: list[float], goodput: dict[str, float]
) -> dict[str, Any]:
    from tqdm import tqdm

    from trunkline.bench.cli import make_texts
    from trunkline.bench.load import make_load
    from trunkline.bench.load_report import load_numbers, load_table
    from trunkline.bench.runner import Server

    rate = math.inf if args.request_rate is None else args.request_rate
    api_key = args.api_key or os.environ.get(API_KEY_VARIABLE) or None
    async with Server(args.url, api_key=api_key, timeout=args.timeout) as server:
        model = args.model or await server.model()
        texts = make_texts(args.tokenizer)
        load = make_load(shape, texts, rate=rate, burstiness=args.burstiness, speed=args.speed or 1.0)
        await server.warm_up(texts, model, seed=shape.seed, count=args.num_warmups)
        print(f"{shape.dataset}: {len(load):,} requests to {args.url}{args.endpoint}, {model}", file=sys.stderr)
        with tqdm(total=len(load), unit="req", disable=None) as bar:
            outcomes, seconds = await server.run_load(load, model, most=args.max_concurrency, on_end=bar.update)
        version = await server.version()
    numbers = load_numbers(outcomes, seconds, percentiles=percentiles, goodput=goodput)
    print(load_table(numbers, metrics=metrics, percentiles=percentiles))
    if numbers["first_error"]:
        print(f"The first error: {numbers['first_error']}")
    return {
        "server": {"base_url": args.url, "model": model, "version": version},
        "dataset": {name: getattr(shape, name) for name in shape.__slots__},
        "request_rate": None if math.isinf(rate) else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **numbers,
    }


def _shape(args: argparse.Namespace) -> "Shape":
    from trunkline.bench.load import Shape

    num_prompts = DEFAULT_PROMPTS if args.num_prompts is None else args.num_prompts
    at_least = {"--num-prompts": num_prompts, "--input-len": args.input_len, "--output-len": args.output_len}
    at_least |= {"--num-prefixes": args.num_prefixes, "--max-concurrency": args.max_concurrency}
    at_least |= {"--block-tokens": args.block_tokens}
    for flag, value in at_least.items():
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}; allowed is 1 and more.")
    for flag, number in {
        "--request-rate": args.request_rate,
        "--burstiness": args.burstiness,
        "--speed": args.speed,
    }.items():
        if number is not None and not number > 0:
            raise ConfigError(f"{flag} is {number:g}; allowed is any number above 0.")
    if not 0 <= args.range_ratio <= 1:
        raise ConfigError(f"--range-ratio is {args.range_ratio:g}; allowed is 0 to 1.")
    if args.prefix_len and args.prefix_len < 8:
        raise ConfigError(f"--prefix-len is {args.prefix_len}; allowed is 0, or 8 and more.")
    dataset = args.dataset_name or ("random" if args.dataset_path is None else "")
    if not dataset:
        raise ConfigError("--dataset-path names a file; say what is in it with --dataset-name, trace or custom.")
    return Shape(
        dataset=dataset,
        num_prompts=num_prompts,
        input_len=args.input_len,
        prefix_len=args.prefix_len,
        output_len=args.output_len,
        range_ratio=args.range_ratio,
        num_prefixes=args.num_prefixes,
        path=args.dataset_path,
        block_tokens=args.block_tokens,
        chat=args.endpoint.endswith("/chat/completions"),
        ignore_eos=args.ignore_eos,
        seed=args.seed,
    )


def _metrics(text: str) -> list[str]:
    names = [word.strip().lower() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics is {shown(text)}; allowed are {', '.join(METRICS)}.")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        ranks = [float(word) for word in text.split(",")]
    except ValueError:
        ranks = [-1.0]
    if not all(0 <= rank <= 100 for rank in ranks):
        raise ConfigError(f"--metric-percentiles is {shown(text)}; allowed are numbers from 0 to 100, such as 90,99.")
    return ranks


def _goodput(words: list[str] | None) -> dict[str, float]:
    limits = {}
    for word in words or ():
        name, _, limit = word.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            name = ""
        if name not in METRICS:
            raise ConfigError(f"--goodput is {shown(word)}; allowed is a metric and milliseconds, such as ttft:500.")
    return limits

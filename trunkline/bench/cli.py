"""`trunkline bench serve`: measure any OpenAI-compatible server, with the workloads W1 … W6 or a load (load_cli.py)."""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trunkline.bench import load_cli
from trunkline.bench.output_file import check_output
from trunkline.bench.workloads import NAMES
from trunkline.config import API_KEY_VARIABLE, DEFAULT_URL, address
from trunkline.errors import ConfigError, StartupError

WORKLOADS_WITHOUT_CROWD = NAMES[:-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline bench serve`, on a parser of the caller's."""
    parser.add_argument(
        "--url",
        "--base-url",
        type=address,
        metavar="URL",
        default=DEFAULT_URL,
        help="the server, with or without /v1",
    )
    parser.add_argument("--model", metavar="NAME", help="the model's name (default: the first that /v1/models lists)")
    parser.add_argument("--api-key", metavar="KEY", help=f"sent as a bearer token (default: ${API_KEY_VARIABLE})")
    parser.add_argument(
        "--workload",
        nargs="+",
        metavar="W",
        help=f"any of {' '.join(NAMES)}, or all, which is {WORKLOADS_WITHOUT_CROWD[0]} … {WORKLOADS_WITHOUT_CROWD[-1]} (default:"
        " all, unless there is a load)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every number to this JSON file as well")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the texts; a new one finds nothing cached")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a model folder or GGUF file whose tokenizer measures the prompts (default: the built-in model's)",
    )
    parser.add_argument(
        "--num-warmups",
        type=int,
        metavar="N",
        default=1,
        help="uncounted requests before each workload",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=600,
        help="of silence that fail a request",
    )
    load_cli.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run what the flags ask for. Returns the exit code: 1 if not one request succeeded.

    Raises StartupError, a sentence for the user, if the flags make no sense or no server answers.
    """
    import asyncio

    is_load = load_cli.is_load(args)
    names = selected(args.workload or ["all"])
    if args.num_warmups < 0:
        raise ConfigError(f"--num-warmups is {args.num_warmups}; allowed is 0 or more.")
    if args.timeout <= 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; allowed is any number of seconds above 0.")
    if args.output is not None:
        check_output("--output", args.output)
    result = run_facts(args) | (load_cli.run_load(args) if is_load else asyncio.run(_measure(args, names)))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    succeeded = result["completed"] if is_load else sum(summary["succeeded"] for summary in result["workloads"])
    return 0 if succeeded else 1


def run_facts(args: argparse.Namespace) -> dict[str, Any]:
    """What numbers need beside them: when, from where, with which texts."""
    from trunkline.bench.report import platform_facts

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": args.seed,
        "tokenizer": Path(args.tokenizer).name if args.tokenizer else "built-in",
        "client": platform_facts(),
    }


def selected(given: Sequence[str]) -> tuple[str, ...]:
    """`["W2", "W1"]` or `["all"]`, also with commas, as names in order. Raises ConfigError for an unknown one."""
    names: list[str] = []
    for name in ",".join(given).split(","):
        if name.lower() == "all":
            names += WORKLOADS_WITHOUT_CROWD
        elif name.upper() in NAMES:
            names.append(name.upper())
        else:
            raise ConfigError(f"--workload is {name!r}; allowed are {', '.join(NAMES)} and all.")
    return tuple(dict.fromkeys(names))


def make_texts(tokenizer: str | None) -> Any:
    """Texts measured by the tokenizer at that path, or by the built-in model's."""
    from trunkline.bench.texts import Texts
    from trunkline.models.hub import find_model
    from trunkline.models.tokenizer import load_tokenizer

    loaded = load_tokenizer(find_model(tokenizer))
    return Texts(lambda text: loaded.encode(text, add_special_tokens=False))


async def _measure(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    from trunkline.bench.report import summarize, table
    from trunkline.bench.runner import Server
    from trunkline.bench.workloads import make_workloads, warm_up

    api_key = args.api_key or os.environ.get(API_KEY_VARIABLE) or None
    async with Server(args.url, api_key=api_key, timeout=args.timeout) as server:
        model = args.model or await server.model()
        texts = make_texts(args.tokenizer)
        summaries = []
        for workload in (workload for name in names for workload in make_workloads(name, texts, args.seed)):
            await server.run(warm_up(workload, texts, args.seed, args.num_warmups), model)
            count = sum(len(session) for session in workload.sessions)
            print(
                f"{workload.name}: {workload.title}, {count} requests, {workload.concurrency} at a time",
                file=sys.stderr,
            )
            summaries.append(summarize(await server.run(workload, model)))
        server_version = await server.version()
    print(table(summaries))
    for line in remarks(summaries):
        print(line)
    return {
        "server": {"base_url": args.url, "model": model, "version": server_version},
        "workloads": summaries,
    }


def remarks(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """What the table cannot say: the first error of a workload, and that the cold prompts were not cold."""
    lines = []
    for one in summaries:
        if one["failures"]:
            failed = f"{one['failures']} of {one['requests']} failed"
            lines.append(f"{one['workload']}: {failed}, the first with: {one['first_error']}")
        if one["workload"] == "W5" and one["cached_tokens"] > one["prompt_tokens"] // 10:
            lines.append("W5: the server had cached these prompts; for cold ones restart it, or take another --seed.")
    if any((one.get("first_error") or "").startswith("HTTP 401") for one in summaries):
        lines.append(f"The server wants an API key; give the right one with --api-key KEY or ${API_KEY_VARIABLE}.")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m trunkline.bench.cli`, the same without the engine's command line around it."""
    parser = argparse.ArgumentParser(prog="trunkline bench serve", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except StartupError as error:
        print(f"trunkline: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

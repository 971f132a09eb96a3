"""`trunkline run-batch`: a file of requests in OpenAI's batch format in, a file of results out. Its flags, and what it prints."""

import argparse
import contextlib
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trunkline.cli_parser import Parser, add_command, add_url, count, positive
from trunkline.cli_serve import check_gpu, serve_config, take_serve_flags
from trunkline.config import API_KEY_VARIABLE, DEFAULT_URL, ServeConfig
from trunkline.errors import ConfigError

if TYPE_CHECKING:
    from trunkline.batch_files import Request, Result, Results
    from trunkline.batch_run import Tally

SOME_FAILED = 3  # exit code: all requests have a result, and some of them another than status 200
NUM_SHOWN, MESSAGE_CHARACTERS = 3, 200  # of what has failed


def add_run_batch(commands: "argparse._SubParsersAction[Parser]") -> None:
    """The command `trunkline run-batch`."""
    command = add_command(
        commands,
        "run-batch",
        "answer a file of requests in OpenAI's batch format, by a running server or an engine of its own",
        _run,
        about="Run again after whatever has cut it off, it goes on where it was.",
        examples=(
            "run-batch -i in.jsonl -o out.jsonl                          # the server on this machine's port 8000",
            "run-batch -i in.jsonl -o out.jsonl --base-url http://host:8000 --concurrency 64",
            "run-batch -i in.jsonl -o out.jsonl --model path/to/model    # without a server; flags of `trunkline serve` may follow",
            "run-batch -i in.jsonl -o out.jsonl --retry-failed           # send those again that failed",
        ),
        more=f"The exit code is {SOME_FAILED} if some requests failed. The files' format, and what becomes of lines that fail:"
        " docs/cli.md.",
    )
    command.set_defaults(take_rest=_take_rest)
    command.add_argument("-i", "--input-file", metavar="FILE", required=True, help="requests, one JSON object a line")
    command.add_argument(
        "-o", "--output-file", metavar="FILE", required=True, help="results; those in it are not asked for again"
    )
    add_url(command, default=None, what=f"the server, with or without /v1 (default: {DEFAULT_URL})")
    command.add_argument(
        "--model",
        metavar="MODEL",
        help="start an engine with this model for the batch, with all flags of `trunkline serve` that follow",
    )
    command.add_argument("--api-key", metavar="KEY", help=f"sent to the server (default: ${API_KEY_VARIABLE})")
    command.add_argument("--concurrency", type=positive, metavar="N", default=32, help="requests under way at a time")
    command.add_argument(
        "--max-retries",
        type=count,
        metavar="N",
        default=5,
        help="tries after the first, where the server is full or does not answer",
    )
    command.add_argument("--retry-failed", action="store_true", help="ask again for results other than status 200")
    command.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=600, help="of silence after which a try has failed"
    )


def _take_rest(args: argparse.Namespace, unknown: list[str]) -> None:
    """With --model, what is not ours is the server's."""
    args.serve = None
    if args.model is not None:
        take_serve_flags(args, unknown)
    elif unknown:
        args.parser.error(args.parser.describe_unknown(unknown))


def _run(args: argparse.Namespace) -> int:
    import asyncio

    from trunkline.batch_files import Results, read_requests
    from trunkline.cli_client import ApiClient

    if args.url is not None and args.model is not None:
        raise ConfigError("--base-url names a server and --model starts one; leave one of them out.")
    if not args.timeout > 0:  # nor is it NaN
        raise ConfigError(f"--timeout is {args.timeout:g}; allowed is any number of seconds above 0.")
    if _same_file(args.input_file, args.output_file):
        raise ConfigError(f"--output-file is {args.output_file!r}, the same as --input-file; name another one.")
    requests = read_requests(args.input_file)
    with Results(args.output_file, requests, retry_failed=args.retry_failed) as results:
        before = results.num_done
        if before:
            print(f"{before:,} of {len(requests):,} results are in {args.output_file} already.", file=sys.stderr)
        try:
            if args.serve is None and any(results.missing()):
                ApiClient(args.url or DEFAULT_URL, api_key=_key(args)).first_model()  # is anybody there?
            own = _own_config(args) if args.serve is not None and any(results.missing()) else None
            tally, seconds = asyncio.run(_answer(args, results, len(requests), own))
        except KeyboardInterrupt:
            done = f"{results.num_done:,} of {len(requests):,} results are in {args.output_file}"
            print(f"\n{done}; run the same command again to go on.", file=sys.stderr)
            return 130
        failures = list(itertools.islice(results.failures(), NUM_SHOWN))
        results.finish()
        failed = len(requests) - results.num_succeeded
        print(_summary(results, len(requests), before, tally, seconds))
        if not failed:
            return 0
        more = [f"  and {failed - len(failures):,} more"] if failed > len(failures) else []
        told = [f"  {_shortened(failure)}" for failure in failures]
        print(
            "\n".join(["Failed:", *told, *more, "Once the cause is mended, --retry-failed asks for them again."]),
            file=sys.stderr,
        )
        return 1 if failed == len(requests) else SOME_FAILED


def _key(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or None


def _shortened(sentence: str) -> str:
    line = " ".join(sentence.split())
    return line if len(line) <= MESSAGE_CHARACTERS else f"{line[: MESSAGE_CHARACTERS - 1]}…"


def _own_config(args: argparse.Namespace) -> ServeConfig:
    """Of a server of our own, whose model is on this machine: downloaded here, where Ctrl-C still ends it at once."""
    from trunkline import logs
    from trunkline.models.hub import with_files

    config = serve_config(args.serve)
    check_gpu(config.engine)
    logs.configure("api", config.api.log_format)
    return msgspec.structs.replace(
        config,
        engine=with_files(config.engine),
        api=msgspec.structs.replace(config.api, enable_log_requests=False),
    )


async def _answer(
    args: argparse.Namespace, results: "Results", total: int, own: ServeConfig | None
) -> "tuple[Tally, float]":
    """Ask for every result that is missing, a server of our `own` if there is to be one.

    Returns what it took: tokens, and seconds from when the server was ready.
    """
    from tqdm import tqdm

    from trunkline.batch_run import Tally, run_batch
    from trunkline.bench.runner import Server

    tally = Tally()
    missing = list(results.missing())
    if not missing:
        return tally, 0.0
    async with contextlib.AsyncExitStack() as stack:
        url, key = args.url or DEFAULT_URL, _key(args)
        if own is not None:
            from trunkline.batch_server import own_server

            url = await stack.enter_async_context(own_server(own))
            key = next(iter(own.api.api_keys), None)
        server = await stack.enter_async_context(Server(url, api_key=key, timeout=args.timeout))
        started = time.monotonic()
        bar = stack.enter_context(
            tqdm(total=total, initial=total - len(missing), desc="Batch", unit="req", disable=None)
        )

        def note(request: "Request", result: "Result") -> None:
            results.add(request, result)
            tally.add(result.body)
            bar.update()

        await run_batch(server, missing, note, concurrency=args.concurrency, max_retries=args.max_retries)
    return tally, time.monotonic() - started


def _summary(results: "Results", total: int, before: int, tally: "Tally", seconds: float) -> str:
    failed = total - results.num_succeeded
    share = f", {100 * tally.cached_tokens / tally.prompt_tokens:.0f} % of them cached" if tally.prompt_tokens else ""
    return (
        f"{total:,} results in {results.path}: {results.num_succeeded:,} succeeded, {failed:,} failed. {total - before:,} of them in"
        f" {seconds:.1f} s: {tally.prompt_tokens:,} prompt tokens{share}, {tally.output_tokens:,} generated."
    )


def _same_file(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)

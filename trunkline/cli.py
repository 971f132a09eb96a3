"""The command line: which commands there are. Parses flags; the work is imported when it is done.

Flags are named as in vLLM where the meaning is the same. An error is one sentence on stderr: exit code 2 for a flag that does not
exist or cannot be read, 1 for anything that cannot be done, 141 if whoever read the output has gone (`| head`), as a shell has it.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from trunkline import __version__
from trunkline.cli_batch import add_run_batch
from trunkline.cli_bench import add_bench
from trunkline.cli_check import add_grammar
from trunkline.cli_env import add_completion, add_env
from trunkline.cli_parser import Parser, add_command, add_group, add_url, positive, print_help
from trunkline.cli_serve import add_serve, serve_config
from trunkline.cli_settings import COMPLETING
from trunkline.config import API_KEY_VARIABLE
from trunkline.errors import RequestError, StartupError

__all__ = ("main", "make_parser", "serve_config")


READER_GONE = 128 + 13  # a shell's exit code of what SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, and not when Python ends, where an error could not be caught
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python flushes both once more
            os.dup2(nowhere, stream.fileno())
        return READER_GONE


def _run(arguments: Sequence[str] | None) -> int:
    args = None
    try:
        parser = make_parser()
        if COMPLETING in os.environ:
            import argcomplete

            argcomplete.autocomplete(parser)
        args = parser.parse(arguments)
        return int(args.run(args))
    except (StartupError, RequestError) as error:
        if args is not None and args.verbose:
            raise
        print(f"trunkline: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="trunkline",
        description="Serve a language model to applications whose prompts repeat themselves. What a prompt has in common with"
        " earlier ones, from its start on, is kept and not computed again.",
        epilog="Every flag is explained in docs/cli.md.",
    )
    parser.add_argument("--version", action="version", version=f"trunkline {__version__}")
    parser.set_defaults(run=print_help, parser=parser, verbose=False)
    commands = parser.add_subparsers(metavar="command", parser_class=Parser)
    add_serve(commands)
    _add_chat(commands)
    _add_complete(commands)
    _add_cache_client(commands)
    add_grammar(commands)
    add_run_batch(commands)
    _add_simulate(commands)
    add_bench(commands)
    add_env(commands)
    add_completion(commands)
    return parser


def _add_chat(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = add_command(
        commands,
        "chat",
        "talk to a running server",
        _chat,
        about="/new forgets the conversation; /quit, or Ctrl-D, ends it; /help lists the commands.",
        examples=(
            "chat",
            "chat --temperature 0 --quick 'What is the capital of France?'",
            "chat --url http://127.0.0.1:8100 --system 'Answer in one sentence.'",
        ),
    )
    _add_client_flags(command)
    command.add_argument("--system", metavar="TEXT", help="a system message at the start")
    command.add_argument("--quick", "-q", metavar="MESSAGE", help="send one message, print the answer, and leave")
    command.add_argument("--max-tokens", type=positive, metavar="N", default=512, help="of an answer")


def _add_complete(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = add_command(
        commands,
        "complete",
        "let a running server continue raw text, without a chat template",
        _complete,
        about="Each line is a text of its own; /quit, or Ctrl-D, ends it.",
        examples=(
            "complete",
            "complete --temperature 0 --max-tokens 16 --quick 'The capital of France is'",
        ),
    )
    _add_client_flags(command)
    command.add_argument("--quick", "-q", metavar="TEXT", help="continue one text, print what comes, and leave")
    command.add_argument("--max-tokens", type=int, metavar="N", default=128, help="of a continuation")


def _add_client_flags(command: argparse.ArgumentParser) -> None:
    """What `chat` and `complete` have in common."""
    command.set_defaults(take_rest=_refuse_rest)
    add_url(command, what="any OpenAI-compatible server, with or without /v1")
    command.add_argument("--model", "--model-name", metavar="NAME", help="(default: the first that the server lists)")
    command.add_argument("--temperature", type=float, metavar="T", default=0.2, help="0: always the likeliest token")
    command.add_argument("--api-key", metavar="KEY", help=f"(default: ${API_KEY_VARIABLE})")


def _refuse_rest(args: argparse.Namespace, unknown: list[str]) -> None:
    """Words without a flag are meant as what to send."""
    if unknown and not any(word.startswith("-") for word in unknown):
        args.parser.error(
            f"unknown argument {unknown[0]}; to send a text, write --quick {shlex.quote(' '.join(unknown))}"
        )
    if unknown:
        args.parser.error(args.parser.describe_unknown(unknown))


def _chat(args: argparse.Namespace) -> int:
    from trunkline.cli_chat import chat

    return chat(args.url, system=args.system, **_client_settings(args))


def _complete(args: argparse.Namespace) -> int:
    from trunkline.cli_chat import complete

    return complete(args.url, **_client_settings(args))


def _client_settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": args.model,
        "quick": args.quick,
        "api_key": args.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        "options": {"temperature": args.temperature, "max_tokens": args.max_tokens},
    }


def _add_cache_client(commands: "argparse._SubParsersAction[Parser]") -> None:
    from trunkline.cli_cache import add_arguments

    add_arguments(add_group(commands, "cache", "look into the cache and the queue of a running server"))


def _add_simulate(commands: "argparse._SubParsersAction[Parser]") -> None:
    from trunkline.cli_simulate import add_arguments, run

    command = add_command(
        commands,
        "simulate",
        "plan capacity: a trace through the real scheduler and tree, on a virtual clock",
        run,
        about="With a formula for what a step costs, it tells hit rates and times to first token for each queue order and size of"
        " cache.",
        examples=(
            "simulate --trace benchmarks/sample_trace.jsonl --cache-tokens 64K,256K",
            "simulate --trace trace.jsonl --cache-tokens 1M --policy fcfs window lpm --load 0.8 --jobs 2",
        ),
        more="What comes out, the format of traces, and what is left out: docs/simulator.md.",
    )
    add_arguments(command)

"""The command line: `trunkline serve`, `trunkline chat`, `trunkline bench`. Parses flags; the work is imported when it is done.

Flags are named as in vLLM where the meaning is the same. An error is one sentence on stderr: exit code 2 for a flag that does not
exist or cannot be read, 1 for anything that cannot be done.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from trunkline import __version__
from trunkline.cli_parser import Parser
from trunkline.config import (
    API_KEY_VARIABLE,
    DEVICES,
    DTYPES,
    LOAD_FORMATS,
    POLICIES,
    ApiConfig,
    CacheConfig,
    ModelSource,
    SchedulerConfig,
    ServeConfig,
    WorkerConfig,
    engine_config,
)
from trunkline.errors import ConfigError, StartupError
from trunkline.units import parse_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    args = make_parser().parse(arguments)
    try:
        return int(args.run(args))
    except StartupError as error:
        if args.verbose:
            raise
        print(f"trunkline: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="trunkline", description="A prefix-tree cache-centric server for language models.")
    parser.add_argument("--version", action="version", version=f"trunkline {__version__}")
    parser.set_defaults(run=_help, parser=parser, verbose=False)
    commands = parser.add_subparsers(metavar="command", parser_class=Parser)
    _add_serve(commands)
    _add_chat(commands)
    _add_bench(commands)
    return parser


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """Settings of `trunkline serve`. Raises ConfigError for values that make no sense, ModelError without a model."""
    if args.model is not None and args.model_flag is not None and args.model != args.model_flag:
        raise ConfigError(f"Two models are named, {args.model!r} and --model {args.model_flag!r}; name one.")
    model = args.model_flag if args.model is None else args.model
    if model is None:
        from trunkline.models.checkpoint import builtin_model

        model = builtin_model()
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; allowed is 0 to 65535, and 0 takes any that is free.")
    engine = engine_config(
        model,
        load_format=args.load_format,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        seed=args.seed,
        block_size=args.block_size,
        enable_prefix_caching=args.enable_prefix_caching,
        kv_cache_memory=args.kv_cache_memory,
        scheduling_policy=args.scheduling_policy,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        device=args.device,
        threads=args.threads,
    )
    api = ApiConfig(
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name or (_served_name(model),)),
        api_key=args.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        chat_template=args.chat_template,
        generation_config=args.generation_config,
    )
    return ServeConfig(engine=engine, api=api)


def _help(args: argparse.Namespace) -> int:
    """A command that needs another word prints what there is."""
    args.parser.print_help()
    return 0


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _served_name(model: str) -> str:
    """What clients call a model that is given by its path: as in vLLM the path itself, but for a GGUF file its bare name."""
    return os.path.basename(model).removesuffix(".gguf") if model.endswith(".gguf") else model


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every default; where it is no plain value, the help text itself says what happens."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def _add_serve(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser(
        "serve",
        help="serve a model behind the OpenAI API",
        description="Serve a model behind the OpenAI API.",
        formatter_class=_Help,
        knows_others=True,
    )
    command.set_defaults(run=_serve, parser=command)
    source, cache, scheduler, worker = ModelSource(path=""), CacheConfig(), SchedulerConfig(), WorkerConfig()
    api = ApiConfig(served_model_names=("",))

    group = command.add_argument_group("model")
    group.add_argument(
        "model", nargs="?", metavar="MODEL", help="a Hugging Face folder or a GGUF file (default: the built-in one)"
    )
    group.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    group.add_argument("--load-format", choices=LOAD_FORMATS, default=source.load_format, help="dummy: random weights")
    group.add_argument("--dtype", choices=DTYPES, default=source.dtype, help="storage of weights and KV cache")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="prompt and output together (default: the model's own length)",
    )
    group.add_argument("--seed", type=int, metavar="N", default=source.seed, help="of dummy weights")
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file, or the template itself (default: the model's own)"
    )
    group.add_argument(
        "--generation-config",
        metavar="auto|vllm|FOLDER",
        default=api.generation_config,
        help="whose generation_config.json gives the default sampling parameters: auto is the model's, vllm nobody's",
    )

    group = command.add_argument_group("cache and scheduling")
    group.add_argument(
        "--block-size", type=int, metavar="N", default=cache.block_size, help="tokens per page of the KV cache"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=cache.enable_prefix_caching,
        help="keep what was read for later requests",
    )
    group.add_argument(
        "--kv-cache-memory",
        type=_size,
        metavar="SIZE",
        help="e.g. 2GiB (default: by the free memory and what the model needs)",
    )
    group.add_argument(
        "--scheduling-policy", choices=POLICIES, default=scheduler.policy, help="order of the waiting requests"
    )
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", default=scheduler.max_num_seqs, help="sequences in one step"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        default=scheduler.max_num_batched_tokens,
        help="tokens in one step: more read prompts faster, fewer keep running streams smoother",
    )

    group = command.add_argument_group("device")
    group.add_argument("--device", choices=DEVICES, default=worker.device, help="what the model runs on")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")

    group = command.add_argument_group("server")
    group.add_argument("--host", default=api.host, help="address to listen on; 0.0.0.0: all")
    group.add_argument("--port", type=int, default=api.port, help="0: any that is free")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what requests call the model (default: MODEL as given)"
    )
    group.add_argument(
        "--api-key", metavar="KEY", help=f"wanted of every request to /v1 (default: ${API_KEY_VARIABLE}, else no key)"
    )
    group.add_argument(
        "-v", "--verbose", action="store_true", help="log every request, and tracebacks of start-up errors"
    )


def _serve(args: argparse.Namespace) -> int:
    config = serve_config(args)
    from trunkline.api.launch import serve

    return serve(config, verbose=args.verbose)


def _add_chat(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser(
        "chat",
        help="talk to a running server",
        description="Talk to a running server. /new forgets the conversation; /quit, or Ctrl-D, ends it.",
        formatter_class=_Help,
    )
    command.set_defaults(run=_chat, parser=command, verbose=False)
    command.add_argument(
        "--url",
        "--base-url",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="any OpenAI-compatible server, with or without /v1",
    )
    command.add_argument("--model", metavar="NAME", help="(default: the first that the server lists)")
    command.add_argument("--system", metavar="TEXT", help="a system message at the start")
    command.add_argument("--quick", "-q", metavar="MESSAGE", help="send one message, print the answer, and leave")
    command.add_argument("--temperature", type=float, metavar="T", default=0.2, help="0: always the likeliest token")
    command.add_argument(
        "--max-tokens", type=int, metavar="N", help="of an answer (default: until the context is full)"
    )
    command.add_argument("--api-key", metavar="KEY", help=f"(default: ${API_KEY_VARIABLE})")


def _chat(args: argparse.Namespace) -> int:
    from trunkline.cli_chat import chat

    return chat(
        args.url,
        model=args.model,
        system=args.system,
        quick=args.quick,
        api_key=args.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        options={"temperature": args.temperature, "max_tokens": args.max_tokens},
    )


def _add_bench(commands: "argparse._SubParsersAction[Parser]") -> None:
    from trunkline.bench.cli import add_arguments, run

    command = commands.add_parser("bench", help="measure a server", description="Measure a server.")
    command.set_defaults(run=_help, parser=command, verbose=False)
    kinds = command.add_subparsers(metavar="what", parser_class=Parser)
    serving = kinds.add_parser(
        "serve", help="any OpenAI-compatible server", description="Measure any OpenAI-compatible server."
    )
    serving.set_defaults(run=run, parser=serving, verbose=False)
    add_arguments(serving)

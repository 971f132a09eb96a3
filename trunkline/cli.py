"""The command line: `trunkline serve`, `chat`, `cache`, `simulate` and `bench`. Parses flags; the work is imported when it is done.

Flags are named as in vLLM where the meaning is the same. An error is one sentence on stderr: exit code 2 for a flag that does not
exist or cannot be read, 1 for anything that cannot be done.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from trunkline import __version__
from trunkline.cli_engine import POLICY_HELP, add_engine_flags
from trunkline.cli_grammar import add_grammar_flags, grammar_api_settings, grammar_engine_flags
from trunkline.cli_parser import Parser
from trunkline.config import (
    ADMIN_API_KEY_VARIABLE,
    API_KEY_VARIABLE,
    CACHE_SHARING,
    DEVICES,
    DTYPES,
    LOAD_FORMATS,
    LOG_FORMATS,
    POLICIES,
    PREEMPTION_MODES,
    ApiConfig,
    CacheConfig,
    ModelSource,
    SchedulerConfig,
    ServeConfig,
    WorkerConfig,
    engine_config,
)
from trunkline.errors import ConfigError, StartupError, shown
from trunkline.units import format_bytes, parse_bytes


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
    parser = Parser(
        prog="trunkline",
        description="Serve a language model to applications whose prompts repeat themselves. What a prompt has in common with"
        " earlier ones, from its start on, is kept and not computed again.",
        epilog="Every flag is explained in docs/cli.md.",
    )
    parser.add_argument("--version", action="version", version=f"trunkline {__version__}")
    parser.set_defaults(run=_help, parser=parser, verbose=False)
    commands = parser.add_subparsers(metavar="command", parser_class=Parser)
    _add_serve(commands)
    _add_chat(commands)
    _add_cache_client(commands)
    _add_simulate(commands)
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
        kv_cache_dtype=args.kv_cache_dtype,
        eviction_policy=args.eviction_policy,
        host_cache_memory=args.host_cache_memory,
        disk_cache_dir=args.disk_cache_dir,
        disk_cache_size=args.disk_cache_size,
        tenant_cache_share=args.tenant_cache_share,
        max_pinned_share=args.max_pinned_share,
        scheduling_policy=args.scheduling_policy,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        fairness=args.fairness,
        target_token_seconds=args.target_token_seconds,
        max_waiting_requests=args.max_waiting_requests,
        max_waiting_tokens=args.max_waiting_tokens,
        preemption_mode=args.preemption_mode,
        num_speculative_tokens=args.num_speculative_tokens,
        device=args.device,
        threads=args.threads,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        tensor_parallel_size=args.tensor_parallel_size,
        **grammar_engine_flags(args),
    )
    api = ApiConfig(
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name or (_served_name(model),)),
        api_keys=_api_keys(args),
        admin_api_key=_key(args.admin_api_key, ADMIN_API_KEY_VARIABLE, "--admin-api-key"),
        cache_sharing=args.cache_sharing,
        chat_template=args.chat_template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        generation_config=args.generation_config,
        log_format=args.log_format,
        max_stored_responses=args.max_stored_responses,
        stored_responses_memory=args.stored_responses_memory,
        **grammar_api_settings(args),
    )
    return ServeConfig(engine=engine, api=api)


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Each once. Raises ConfigError for what no client can send, and for a model that slipped in among them."""
    given = args.api_key or [key for key in [os.environ.get(API_KEY_VARIABLE)] if key]
    if args.api_key and args.model is None and os.path.exists(args.api_key[-1]):
        raise ConfigError("The last --api-key is the path of a file or folder. Write the model before the flags.")
    return tuple(dict.fromkeys(_checked_key(key, "--api-key") for key in given))


def _key(given: str | None, variable: str, flag: str) -> str | None:
    key = given or os.environ.get(variable)
    return _checked_key(key, flag) if key else None


def _checked_key(key: str, flag: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key or not key:
        raise ConfigError(
            f"A key of {flag} is empty or has other characters than visible ASCII, which no client can send."
        )
    return key


def _help(args: argparse.Namespace) -> int:
    """A command that needs another word prints what there is."""
    args.parser.print_help()
    return 0


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"is {shown(text)}; allowed is an integer of at least 0.")
    return int(text)


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
        epilog="More about each flag, and what it is called in other servers: docs/cli.md.",
        formatter_class=_Help,
        knows_others=True,
    )
    command.set_defaults(run=_serve, parser=command)
    source, worker, api = ModelSource(path=""), WorkerConfig(), ApiConfig(served_model_names=("",))

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
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=source.seed,
        help="decides the random weights of --load-format dummy; requests bring seeds of their own",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file, or the template itself (default: the model's own)"
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        default=api.tool_call_parser,
        help="how the model writes tool calls; auto: what its chat template teaches. Names: docs/tools.md",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="accepted, since other servers want it: models may always choose to call tools",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        default=api.reasoning_parser,
        help="how the model writes its thoughts, which then are reasoning_content; none: they stay in the text",
    )
    group.add_argument(
        "--generation-config",
        metavar="auto|vllm|FOLDER",
        default=api.generation_config,
        help="whose generation_config.json gives the default sampling parameters: auto is the model's, vllm nobody's",
    )

    _add_cache(command.add_argument_group("cache"), CacheConfig())
    _add_scheduling(command.add_argument_group("scheduling"), SchedulerConfig())

    add_grammar_flags(command.add_argument_group("structured output"), _size)

    group = command.add_argument_group("device")
    group.add_argument(
        "--device",
        choices=DEVICES,
        default=worker.device,
        help="what the model runs on; auto: cuda where there is a GPU, else cpu",
    )
    add_engine_flags(group, "--gpu-memory-utilization", "--enforce-eager")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads, of each rank (default: all cores)")
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        default=worker.tensor_parallel_size,
        help="ranks: processes that hold the model together, each its part of every layer on a GPU of its own, or on the CPU",
    )

    group = command.add_argument_group("server")
    group.add_argument("--host", default=api.host, help="address to listen on; 0.0.0.0: all")
    group.add_argument("--port", type=int, default=api.port, help="0: any that is free")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what requests call the model (default: MODEL as given)"
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="every request to /v1 must carry one of these keys. Each key is a tenant with a cache of its own"
        f" (default: ${API_KEY_VARIABLE}, else no key is asked for, and all share one cache)",
    )
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help=f"a key that may also see and flush what other keys have cached (default: ${ADMIN_API_KEY_VARIABLE})",
    )
    group.add_argument(
        "--cache-sharing",
        choices=CACHE_SHARING,
        default=api.cache_sharing,
        help="who finds whose cached prefixes: key, each API key its own; all, everybody everybody's",
    )
    group.add_argument(
        "--max-stored-responses",
        type=_count,
        metavar="N",
        default=api.max_stored_responses,
        help="responses of /v1/responses that are kept in memory, to be continued by previous_response_id; 0: none",
    )
    group.add_argument(
        "--stored-responses-memory",
        type=_size,
        metavar="SIZE",
        default=format_bytes(api.stored_responses_memory).replace(".0 ", ""),
        help="memory that they may take",
    )
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=api.log_format,
        help="text: lines for people; json: every line an object, of all processes",
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="log every HTTP request with its status (requests that generate have a line of their own without it), and show the"
        " traceback if the start fails",
    )


def _add_cache(group: argparse._ArgumentGroup, cache: CacheConfig) -> None:
    add_engine_flags(group, "--block-size")
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
    add_engine_flags(group, "--kv-cache-dtype", "--eviction-policy")
    group.add_argument(
        "--host-cache-memory",
        type=_size,
        metavar="SIZE",
        help="keep in host memory what is evicted (default: none, or what --disk-cache-dir needs)",
    )
    group.add_argument(
        "--disk-cache-dir", metavar="FOLDER", help="keep on disk what is used twice or evicted; survives a restart"
    )
    group.add_argument(
        "--disk-cache-size",
        type=_size,
        metavar="SIZE",
        help="of all files in --disk-cache-dir, beyond which those used least recently are deleted (default:"
        f" {format_bytes(cache.disk_cache_size).replace('.0 ', '')})",
    )
    group.add_argument(
        "--tenant-cache-share",
        type=float,
        metavar="SHARE",
        default=cache.tenant_cache_share,
        help="one tenant may have at most this share of the cache, 0 to 1: what is above leaves at once, even if there is room."
        " Without --api-key everybody is one tenant, so it then bounds the whole cache",
    )
    group.add_argument(
        "--max-pinned-share",
        type=float,
        metavar="SHARE",
        default=cache.max_pinned_share,
        help="of the pages: what one tenant may pin; all together twice that",
    )


def _add_scheduling(group: argparse._ArgumentGroup, scheduler: SchedulerConfig) -> None:
    group.add_argument("--scheduling-policy", choices=POLICIES, default=scheduler.policy, help=POLICY_HELP)
    add_engine_flags(group, "--max-num-seqs")
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        default=scheduler.max_num_batched_tokens,
        help="tokens in one step: more read prompts faster, fewer keep running streams smoother",
    )
    add_engine_flags(group, "--target-token-seconds", "--fairness")
    group.add_argument(
        "--max-waiting-requests",
        type=int,
        metavar="N",
        default=scheduler.max_waiting_requests,
        help="more are refused with 429",
    )
    group.add_argument(
        "--max-waiting-tokens",
        type=int,
        metavar="N",
        default=scheduler.max_waiting_tokens,
        help="of the prompts that wait; more are refused with 429",
    )
    group.add_argument(
        "--preemption-mode",
        choices=PREEMPTION_MODES,
        default=scheduler.preemption_mode,
        help="how a preempted request comes back; auto: the cheaper way",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="N",
        default=scheduler.num_speculative_tokens,
        help="drafts a request may have in one step, from the tree or its own prompt; 0: none",
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


def _add_cache_client(commands: "argparse._SubParsersAction[Parser]") -> None:
    from trunkline.cli_cache import add_arguments

    command = commands.add_parser(
        "cache",
        help="look into the cache and the queue of a running server",
        description="Look into the cache and the queue of a running server.",
    )
    command.set_defaults(run=_help, parser=command, verbose=False)
    add_arguments(command.add_subparsers(metavar="what", parser_class=Parser))


def _add_simulate(commands: "argparse._SubParsersAction[Parser]") -> None:
    from trunkline.cli_simulate import add_arguments, run

    command = commands.add_parser(
        "simulate",
        help="plan capacity: a trace through the real scheduler and tree, on a virtual clock",
        description="Run recorded traffic through the real scheduler and prefix tree on a virtual clock, with a formula for what a"
        " step costs: hit rates and times to first token for each queue order and size of cache.",
        epilog="What comes out, the format of traces, and what is left out: docs/simulator.md.",
        formatter_class=_Help,
    )
    command.set_defaults(run=run, parser=command, verbose=False)
    add_arguments(command)


def _add_bench(commands: "argparse._SubParsersAction[Parser]") -> None:
    from trunkline.bench import cache_cli, cli

    command = commands.add_parser(
        "bench", help="measure a server, or the prefix cache", description="Measure a server, or the prefix cache."
    )
    command.set_defaults(run=_help, parser=command, verbose=False)
    kinds = command.add_subparsers(metavar="what", parser_class=Parser)
    serving = kinds.add_parser(
        "serve", help="any OpenAI-compatible server", description="Measure any OpenAI-compatible server."
    )
    serving.set_defaults(run=cli.run, parser=serving, verbose=False)
    cli.add_arguments(serving)
    cache = kinds.add_parser(
        "cache",
        help="what the prefix tree costs, operation by operation",
        description="Measure what the prefix tree costs, operation by operation, and its hit rate on recorded traffic.",
    )
    cache.set_defaults(run=cache_cli.run, parser=cache, verbose=False)
    cache_cli.add_arguments(cache)

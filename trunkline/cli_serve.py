"""`trunkline serve`: its flags, and the settings that they make. Knows every flag, and starts nothing by itself."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trunkline.cli_engine import POLICY_HELP, add_engine_flags
from trunkline.cli_grammar import add_grammar_flags, grammar_api_settings, grammar_engine_flags
from trunkline.cli_parser import Parser, add_command, count, size, token_count
from trunkline.cli_settings import LayeredParser, add_settings_flags, misspelt_variables, show_settings
from trunkline.config import (
    ADMIN_API_KEY_VARIABLE,
    API_KEY_VARIABLE,
    CACHE_SHARING,
    DEVICES,
    DTYPE_ALIASES,
    DTYPES,
    LOAD_FORMATS,
    LOG_FORMATS,
    POLICIES,
    POOLINGS,
    PREEMPTION_MODES,
    QUANTIZATIONS,
    ApiConfig,
    CacheConfig,
    EngineConfig,
    EngineFlags,
    ModelSource,
    SchedulerConfig,
    ServeConfig,
    WorkerConfig,
    engine_config,
)
from trunkline.errors import ConfigError
from trunkline.units import format_bytes


def named_model(args: argparse.Namespace) -> str:
    """The model that the flags name, else the built-in one. Raises ConfigError for two of them, ModelError if there is none."""
    if args.model is not None and args.model_flag is not None and args.model != args.model_flag:
        raise ConfigError(f"Two models are named, {args.model!r} and --model {args.model_flag!r}; name one.")
    model: str | None = args.model_flag if args.model is None else args.model
    if model is None:
        from trunkline.models.hub import find_model

        model = find_model(None)
    return model


def engine_flags(args: argparse.Namespace) -> EngineFlags:
    """The engine's settings, as `engine_config` and `LLM` take them."""
    return {
        "revision": args.revision,
        "download_dir": args.download_dir,
        "load_format": args.load_format,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "max_model_len": args.max_model_len,
        "seed": args.seed,
        "block_size": args.block_size,
        "enable_prefix_caching": args.enable_prefix_caching,
        "kv_cache_memory": args.kv_cache_memory,
        "kv_cache_dtype": args.kv_cache_dtype,
        "eviction_policy": args.eviction_policy,
        "host_cache_memory": args.host_cache_memory,
        "disk_cache_dir": args.disk_cache_dir,
        "disk_cache_size": args.disk_cache_size,
        "tenant_cache_share": args.tenant_cache_share,
        "max_pinned_share": args.max_pinned_share,
        "scheduling_policy": args.scheduling_policy,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "fairness": args.fairness,
        "target_token_seconds": args.target_token_seconds,
        "max_waiting_requests": args.max_waiting_requests,
        "max_waiting_tokens": args.max_waiting_tokens,
        "preemption_mode": args.preemption_mode,
        "num_speculative_tokens": args.num_speculative_tokens,
        "device": args.device,
        "threads": args.threads,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "enforce_eager": args.enforce_eager,
        "tensor_parallel_size": args.tensor_parallel_size,
        **grammar_engine_flags(args),  # type: ignore[typeddict-item]
    }


def engine_settings(args: argparse.Namespace, changes: Mapping[str, Any]) -> tuple[str, EngineFlags]:
    """The model's path and the settings that `LLM` takes, but for `changes`, in which "model" may stand, too.

    Raises as `named_model`, and as `models.hub.find_model`.
    """
    from trunkline.models.hub import with_files

    flags: dict[str, Any] = {**engine_flags(args), **changes}
    if "model" in changes:
        flags["revision"] = changes.get("revision")
    model = flags.pop("model", None) or named_model(args)
    path = with_files(engine_config(model, **flags)).model.path
    return path, cast(EngineFlags, flags | {"revision": None, "download_dir": None})


def check_gpu(config: EngineConfig) -> None:
    """Raises ConfigError at once, before torch is imported and weights are read, if a GPU is asked for and there is none."""
    if config.worker.device != "cuda":
        return
    from trunkline.gpu_driver import is_interpreted, num_gpus

    if is_interpreted() or num_gpus():
        return
    raise ConfigError(
        "--device is 'cuda', but the NVIDIA driver is not there or knows of no GPU. See that nvidia-smi lists one, or use"
        " --device cpu."
    )


def take_serve_flags(args: argparse.Namespace, unknown: Sequence[str], *, names_model: bool = True) -> None:
    """For a command that starts an engine of its own: what is not its flag is one of `trunkline serve`, kept as `args.serve`.

    Errors name the command that was run. `names_model` is LayeredParser's.
    """
    parser = LayeredParser(knows_others=True, prog=args.parser.prog)
    parser.names_model = names_model
    parser.set_defaults(parser=parser)
    _add_flags(parser)
    model = [] if args.model is None else ["--model", args.model]
    args.serve = parser.parse([*model, "--host", "127.0.0.1", "--port", "0", *unknown])


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """Settings of `trunkline serve`; the model may still be a name on the hub. Raises ConfigError for values that make no sense,
    ModelError without a model."""
    model = named_model(args)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; allowed is 0 to 65535, and 0 takes any that is free.")
    engine = engine_config(model, **engine_flags(args))
    api = ApiConfig(
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name or (_served_name(model),)),
        api_keys=_api_keys(args),
        admin_api_key=_checked_key(args.admin_api_key, "--admin-api-key") if args.admin_api_key else None,
        cache_sharing=args.cache_sharing,
        chat_template=args.chat_template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        pooling=args.pooling,
        generation_config=args.generation_config,
        log_format=args.log_format,
        enable_log_requests=args.enable_log_requests,
        otlp_endpoint=args.otlp_endpoint,
        strict_params=args.strict_params,
        dashboard=args.dashboard,
        max_stored_responses=args.max_stored_responses,
        stored_responses_memory=args.stored_responses_memory,
        **grammar_api_settings(args),
    )
    return ServeConfig(engine=engine, api=api)


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Each once. Raises ConfigError for what no client can send, and for a model that slipped in among them."""
    given = args.api_key or []
    if args.api_key and args.model is None and os.path.exists(args.api_key[-1]):
        raise ConfigError("The last --api-key is the path of a file or folder. Write the model before the flags.")
    return tuple(dict.fromkeys(_checked_key(key, "--api-key") for key in given))


def _checked_key(key: str, flag: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key or not key:
        raise ConfigError(
            f"A key of {flag} is empty or has other characters than visible ASCII, which no client can send."
        )
    return key


def _served_name(model: str) -> str:
    """What clients call a model: as in vLLM its path, or its name on the hub; but a GGUF file's bare name."""
    return os.path.basename(model).removesuffix(".gguf") if model.endswith(".gguf") else model


def add_serve(commands: "argparse._SubParsersAction[Parser]") -> None:
    """The command `trunkline serve`."""
    command = add_command(
        commands,
        "serve",
        "serve a model behind the OpenAI API",
        _serve,
        examples=(
            "serve                                        # the built-in model, on http://127.0.0.1:8000/v1",
            "serve path/to/model --port 8100              # a Hugging Face folder, or a GGUF file",
            "serve HuggingFaceTB/SmolLM2-360M-Instruct    # on the Hugging Face hub; downloaded the first time",
            "serve model.gguf --max-model-len 4K --kv-cache-memory 2GiB",
            "serve --config server.yaml --show-config     # what each setting is, and where it comes from",
        ),
        more="Every flag can also stand in a file (--config) and in the environment: --max-model-len is $TRUNKLINE_MAX_MODEL_LEN."
        " More about each flag, and what it is called in other servers: docs/cli.md.",
        make=LayeredParser,
        knows_others=True,
    )
    _add_flags(command)


def _add_flags(command: argparse.ArgumentParser) -> None:
    add_settings_flags(command.add_argument_group("settings"))
    add_model_flags(command)
    add_server_flags(command)


def add_model_flags(command: argparse.ArgumentParser) -> None:
    """Flags about the model, its cache, its schedule and its device: all but those of the server."""
    source, worker, api = ModelSource(path=""), WorkerConfig(), ApiConfig(served_model_names=("",))

    group = command.add_argument_group("model")
    group.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder, a GGUF file, or a name on the hub: org/name, org/name:Q4_K_M, org/name/file.gguf (default: the"
        " built-in one)",
    )
    group.add_argument("--model", "-hf", "--hf-repo", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    group.add_argument(
        "--revision", metavar="NAME", help="of a model on the hub: a branch, a tag or a commit (default: main)"
    )
    group.add_argument(
        "--download-dir",
        metavar="FOLDER",
        help="where models are downloaded to and looked for (default: the hub's own cache, ~/.cache/huggingface/hub)",
    )
    group.add_argument("--load-format", choices=LOAD_FORMATS, default=source.load_format, help="dummy: random weights")
    group.add_argument(
        "--dtype",
        choices=(*DTYPES, *DTYPE_ALIASES),
        default=source.dtype,
        help="storage of weights and KV cache; half and float are float16 and float32",
    )
    group.add_argument(
        "--quantization",
        "-q",
        choices=QUANTIZATIONS,
        default=source.quantization,
        help="storage of matrices on a CPU. none: as --dtype says; gguf, awq, gptq, bitsandbytes, fp8: as such a checkpoint has them, and an"
        " error for another; int8: 8 bits a weight, quantized at the start; auto: what the checkpoint has unless there is a --dtype",
    )
    group.add_argument(
        "--max-model-len",
        type=token_count,
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
        "--pooling",
        choices=("auto", *POOLINGS),
        default=api.pooling,
        help="what embeddings are made of: the mean of all hidden states, or that of the last token; auto: what the checkpoint says,"
        " else last",
    )
    group.add_argument(
        "--generation-config",
        metavar="auto|vllm|FOLDER",
        default=api.generation_config,
        help="whose generation_config.json gives the default sampling parameters: auto is the model's, vllm nobody's",
    )

    _add_cache(command.add_argument_group("cache"), CacheConfig())
    _add_scheduling(command.add_argument_group("scheduling"), SchedulerConfig())

    add_grammar_flags(command.add_argument_group("structured output"), size)

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


def add_server_flags(command: argparse.ArgumentParser) -> None:
    """Flags of the HTTP side."""
    api = ApiConfig(served_model_names=("",))
    group = command.add_argument_group("server")
    group.add_argument("--host", default=api.host, help="address to listen on; 0.0.0.0: all")
    group.add_argument("--port", type=int, default=api.port, help="0: any that is free")
    names = "what requests call the model (default: MODEL as given)"
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help=names)
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
    group.add_argument("--strict-params", action="store_true", help="refuse requests with unknown fields")
    group.add_argument(
        "--dashboard",
        action=argparse.BooleanOptionalAction,
        default=api.dashboard,
        help="serve a page at / that shows the cache and the requests",
    )
    group.add_argument(
        "--max-stored-responses",
        type=count,
        metavar="N",
        default=api.max_stored_responses,
        help="responses of /v1/responses that are kept in memory, to be continued by previous_response_id; 0: none",
    )
    group.add_argument(
        "--stored-responses-memory",
        type=size,
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
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=api.enable_log_requests,
        help="a line of the log for each request that generates, or is refused, without its text",
    )
    group.add_argument(
        "--otlp-endpoint",
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send traces to this collector by OTLP over HTTP, e.g. http://localhost:4318 (default: none; it needs the packages"
        " of pip install 'trunkline[otel]')",
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
        type=size,
        metavar="SIZE",
        help="e.g. 2GiB (default: by the free memory and what the model needs)",
    )
    add_engine_flags(group, "--kv-cache-dtype", "--eviction-policy")
    group.add_argument(
        "--host-cache-memory",
        type=size,
        metavar="SIZE",
        help="keep in host memory what is evicted (default: none, or what --disk-cache-dir needs)",
    )
    group.add_argument(
        "--disk-cache-dir", metavar="FOLDER", help="keep on disk what is used twice or evicted; survives a restart"
    )
    group.add_argument(
        "--disk-cache-size",
        type=size,
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
        type=token_count,
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
        type=token_count,
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
    if args.show_config:
        print(show_settings(args))
        return 0
    check_gpu(config.engine)
    for sentence in misspelt_variables(args.parser, os.environ):
        print(f"trunkline serve: warning: {sentence}", file=sys.stderr)
    from trunkline.api.launch import serve

    return serve(config, verbose=args.verbose)

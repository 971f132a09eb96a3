"""`trunkline bench quality`: which text, which formats, against what. bench/quality.py measures, imported when needed."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline.cli_parser import positive, token_count
from trunkline.cli_serve import check_gpu, engine_settings
from trunkline.cli_settings import LayeredParser
from trunkline.config import EngineConfig, EngineFlags, engine_config
from trunkline.errors import ConfigError, shown

if TYPE_CHECKING:
    from trunkline.bench.quality import Measured
    from trunkline.llm import LLM
    from trunkline.outputs import RequestOutput
    from trunkline.sampling import SamplingParams

FULL_PRECISION = ("dtype=float32", "quantization=none", "kv-cache-dtype=auto")

Changes = dict[str, Any]  # settings by the names of EngineFlags, and "model"


def add_arguments(command: argparse.ArgumentParser) -> None:
    # It is listed, and not taken: values of the engine's flags, which this parser does not know, would look like it.
    command.add_argument(
        "file", nargs=argparse.SUPPRESS, metavar="FILE", help="a text, UTF-8 (default: one that is shipped)"
    )
    command.add_argument(
        "--formats",
        nargs="+",
        metavar="SETTING=VALUE[,…]",
        help="measure each of these: the same engine but for such settings (default: the engine as the flags say)",
    )
    command.add_argument(
        "--baseline",
        nargs="+",
        metavar="SETTING=VALUE",
        help="compare with the same engine but for these settings: dtype, kv-cache-dtype, model, …; none: with nothing (default:"
        f" full precision, {' '.join(FULL_PRECISION)})",
    )
    command.add_argument(
        "--context", type=positive, metavar="TOKENS", default=512, help="of a window; each is read by itself"
    )
    command.add_argument("--windows", type=positive, metavar="N", help="the first so many (default: the whole text)")
    command.add_argument(
        "--continuations",
        type=token_count,
        metavar="N",
        default=16,
        help="windows whose first quarter is also continued, with the likeliest token each time; 0: none",
    )
    command.add_argument(
        "--continuation-tokens", type=positive, metavar="N", default=64, help="tokens to be written for each"
    )


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What every format costs, as numbers and as text: of the engine that the flags describe, but for some changes.

    Raises ConfigError for a text that cannot be read or is too short, and for settings that make no sense, whichever of them it is
    before the first is measured; ModelError for a model that cannot be served.
    """
    from trunkline.bench.quality import measure, table
    from trunkline.llm import LLM

    text = _read(args.file)
    if args.continuations < 0:
        raise ConfigError(f"--continuations is {args.continuations}; allowed is 0 and more.")
    if args.context < 2:
        raise ConfigError(
            f"--context is {args.context}; allowed is 2 and more, since a window's first token is not scored."
        )
    parser = args.serve.parser
    formats = [_changes(parser, "--formats", word.split(",")) for word in args.formats or []] or [{}]
    against = None if args.baseline == ["none"] else _changes(parser, "--baseline", args.baseline or FULL_PRECISION)
    pieces = _windows(args, text, formats if against is None else [*formats, against])

    def measured(changes: Changes) -> "Measured":
        model, flags = engine_settings(args.serve, changes)
        with LLM(model, **flags) as llm:
            worker: Any = llm.engine.worker  # the protocol does not tell how weights are stored
            return measure(
                changes,
                worker.dtype,
                pieces,
                lambda pieces: _scores(llm, pieces),
                lambda prompts, num_tokens: _written(llm, prompts, num_tokens),
                continuations=args.continuations,
                tokens=args.continuation_tokens,
            )

    found = [measured(changes) for changes in formats]
    baseline = None
    if against is not None:
        baseline = next((one for one in found if one.settings == against), None) or measured(against)
    num_tokens, num_written = len(found[0].scores.logprobs), len(found[0].written)
    numbers: dict[str, Any] = {"text": args.file, "tokens": num_tokens, "context": args.context}
    numbers |= {"continuations": num_written, "continuation_tokens": args.continuation_tokens}
    numbers |= {"formats": [one.numbers(baseline) for one in found]}
    numbers |= {"baseline": baseline.numbers(None) if baseline is not None else None}
    told = f"{num_tokens:,} tokens of {args.file or 'the shipped text'} in windows of {args.context:,}"
    if num_written:
        told += f"; {num_written:,} texts of {args.continuation_tokens:,} tokens written"
    return numbers, f"{told}.\n\n{table(found, baseline)}"


def _read(file: str | None) -> str:
    if file is None:
        from trunkline.bench.quality import shipped_text

        return shipped_text()
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"The text {file} cannot be read: {reason}.") from None


def _windows(args: argparse.Namespace, text: str, settings: Sequence[Changes]) -> list[list[int]]:
    """The text as token ids, the same with each of the settings.

    Raises ConfigError and ModelError for what any of them would be refused for, as far as that can be told without reading weights.
    """
    from trunkline.bench.quality import windows
    from trunkline.models.tokenizer import load_tokenizer

    found: dict[str, list[list[int]]] = {}  # by model
    for changes in settings:
        model, flags = engine_settings(args.serve, changes)
        longest = _longest_request(engine_config(model, **flags))
        if model not in found:
            token_ids = load_tokenizer(model).encode(text, add_special_tokens=False)
            found[model] = windows(token_ids, args.context, most=args.windows)
        _check_room(args, found[model], longest, changes)
    (first, pieces), *others = found.items()
    for other, theirs in others:
        if theirs != pieces:
            raise ConfigError(
                f"{first} and {other} do not read the same tokens in this text, so what they make of it cannot be compared; measure"
                " each by itself, with --baseline none."
            )
    return pieces


def _longest_request(config: EngineConfig) -> int:
    """Tokens of one request that the model can read. (The KV cache always has room for one of these.)

    Raises ConfigError and ModelError for settings that don't fit the model or this machine.
    """
    from trunkline.inputs import check_writes
    from trunkline.kernels.select import resolve_device
    from trunkline.models.checkpoint import open_checkpoint
    from trunkline.sampling import SamplingParams
    from trunkline.workers.kv_format import kv_dtype_on_cpu

    check_gpu(config)
    checkpoint = open_checkpoint(config.model)
    check_writes(checkpoint.config.has_head, SamplingParams())
    checkpoint.check_ranks(config.worker.tensor_parallel_size)
    if resolve_device(config.worker.device) == "cpu":
        kv_dtype_on_cpu(config.cache.kv_cache_dtype)
    return config.model.max_model_len or checkpoint.config.max_position_embeddings


def _check_room(args: argparse.Namespace, pieces: Sequence[list[int]], longest: int, changes: Changes) -> None:
    """Raises ConfigError if a window, or a beginning and what is to be written behind it, is more than `longest` tokens."""
    from trunkline.bench.quality import beginning, named

    which = f" with {named(changes)}" if changes else ""
    if len(pieces[0]) > longest:
        raise ConfigError(
            f"--context is {args.context}; allowed is 2 to {longest}, which is as long as a request can be{which}. Give less."
        )
    room = longest - len(beginning(pieces[0]))
    if args.continuations and args.continuation_tokens > room:
        raise ConfigError(
            f"--continuation-tokens is {args.continuation_tokens}; allowed is 1 to {room} behind a quarter of --context, since a request"
            f" can be {longest} tokens long{which}. Give less, or --continuations 0."
        )


def _scores(llm: "LLM", pieces: Sequence[list[int]]) -> list[Any]:
    """What every token but the first of each piece is scored with."""
    from trunkline.sampling import SamplingParams

    return [output.prompt_logprobs for output in _run(llm, pieces, SamplingParams(max_tokens=0, prompt_logprobs=1))]


def _written(llm: "LLM", prompts: Sequence[list[int]], num_tokens: int) -> list[tuple[int, ...]]:
    from trunkline.sampling import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in _run(llm, prompts, sampling)]


def _run(llm: "LLM", prompts: Sequence[list[int]], sampling: "SamplingParams") -> "list[RequestOutput]":
    """As many at a time as may wait in the queue."""
    most = llm.engine.scheduler.config.max_waiting_requests
    groups = (prompts[start : start + most] for start in range(0, len(prompts), most))
    return [output for group in groups for output in llm.generate(group, sampling)]


def _changes(parser: LayeredParser, flag: str, words: Sequence[str]) -> Changes:
    """Values as `parser`, that of the engine's flags, reads them."""
    changes: Changes = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"{flag} is {shown(word)}; allowed is a setting and its value, such as dtype=float32.")
        setting, read = parser.read_setting(name, value, flag)
        setting = "model" if setting == "model_flag" else setting
        if setting != "model" and setting not in EngineFlags.__annotations__:
            raise ConfigError(
                f"{flag} is {shown(word)}, which is no setting of the model or the engine, as dtype=float32 is."
            )
        changes[setting] = read
    return changes

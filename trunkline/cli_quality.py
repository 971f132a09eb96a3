"""`trunkline bench quality`: which text, which formats, against what. bench/quality.py measures, imported when needed."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline.cli_parser import positive, token_count
from trunkline.config import DTYPE_ALIASES
from trunkline.errors import ConfigError, shown

if TYPE_CHECKING:
    from trunkline.bench.quality import Measured
    from trunkline.llm import LLM

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


def run(
    args: argparse.Namespace, open_llm: "Callable[[Changes], AbstractContextManager[LLM]]"
) -> tuple[dict[str, Any], str]:
    """What every format costs, as numbers and as text.

    open_llm  the engine that the flags describe, but for some changes

    Raises ConfigError for a text that cannot be read or is too short, and for settings that make no sense.
    """
    from trunkline.bench.quality import measure, table, windows

    text = _read(args.file)
    formats = [_changes("--formats", word.split(",")) for word in args.formats or []] or [{}]
    against = None if args.baseline == ["none"] else _changes("--baseline", args.baseline or FULL_PRECISION)
    if args.continuations < 0:
        raise ConfigError(f"--continuations is {args.continuations}; allowed is 0 and more.")

    def measured(changes: Changes) -> "Measured":
        with open_llm(changes) as llm:
            worker: Any = llm.engine.worker  # the protocol does not tell how weights are stored
            return measure(
                changes,
                worker.dtype,
                windows(llm.tokenizer.encode(text, add_special_tokens=False), args.context, most=args.windows),
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


def _scores(llm: "LLM", pieces: Sequence[list[int]]) -> list[Any]:
    """What every token but the first of each piece is scored with."""
    from trunkline.sampling import SamplingParams

    return [output.prompt_logprobs for output in llm.generate(pieces, SamplingParams(max_tokens=0, prompt_logprobs=1))]


def _written(llm: "LLM", prompts: Sequence[list[int]], num_tokens: int) -> list[tuple[int, ...]]:
    from trunkline.sampling import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]


def _changes(flag: str, words: Sequence[str]) -> Changes:
    changes: Changes = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"{flag} is {shown(word)}; allowed is a setting and its value, such as dtype=float32.")
        key = name.removeprefix("--").replace("-", "_")
        changes[key] = int(value) if value.isdecimal() else DTYPE_ALIASES.get(value, value)
    return changes

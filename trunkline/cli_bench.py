"""`trunkline bench`: which kinds there are, the flags of those that run an engine of their own, and what they print.

What is measured is in trunkline/bench; `serve` and `cache` have their flags there, too.
"""

import argparse
import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline import cli_quality
from trunkline.bench import cache_cli, cli
from trunkline.bench.tables import NONE
from trunkline.cli_parser import Parser, add_command, add_group, positive, token_count
from trunkline.cli_serve import engine_settings, take_serve_flags
from trunkline.config import GRAMMAR_BACKENDS
from trunkline.errors import ConfigError, shown
from trunkline.profiling import command as profile_step

if TYPE_CHECKING:
    from trunkline.bench.grammar import Cost
    from trunkline.bench.offline import Round
    from trunkline.bench.steps import StepTime
    from trunkline.llm import LLM

SERVE_FLAGS = "All flags of `trunkline serve` that are about the model and the engine may follow."


def add_bench(commands: "argparse._SubParsersAction[Parser]") -> None:
    """The commands under `trunkline bench`."""
    kinds = add_group(commands, "bench", "measure a server, an engine, or a part of one")
    serving = add_command(
        kinds,
        "serve",
        "measure any OpenAI-compatible server",
        cli.run,
        about="With workloads, or with a load that comes at a rate.",
        examples=(
            "bench serve --workload W2 --output numbers.json",
            "bench serve --dataset-name random --prefix-len 512 --input-len 64 --num-prompts 50 --request-rate 2",
            "bench serve --dataset-name trace --dataset-path benchmarks/sample_trace.jsonl --num-prompts 40 --block-tokens 32",
        ),
        more="Flags of a load are named as in vLLM's `bench serve`. The workloads: benchmarks/README.md.",
    )
    cli.add_arguments(serving)
    cache = add_command(
        kinds,
        "cache",
        "measure what the prefix tree costs, operation by operation",
        cache_cli.run,
        about="With a trace, its hit rate on recorded traffic as well.",
        examples=("bench cache", "bench cache --trace benchmarks/sample_trace.jsonl --rows 100"),
    )
    cache_cli.add_arguments(cache)
    _add_grammar(kinds)
    _add_step(kinds)
    _add_quality(kinds)
    _add_offline(kinds)


# ---------------------------------------------------------------- grammar


def _add_grammar(kinds: "argparse._SubParsersAction[Parser]") -> None:
    command = add_command(
        kinds,
        "grammar",
        "measure what JSON schemas cost: compiling them, and the mask of each token, by backend",
        _grammar,
        about="Needs no server, and of a model only the tokenizer. Times are CPU time.",
        examples=(
            "bench grammar schema.json",
            "bench grammar folder-of-schemas --backend llguidance xgrammar --json",
            "bench grammar schemas.jsonl --walks 5 --tokens 400",
        ),
    )
    command.add_argument(
        "path",
        metavar="PATH",
        help='a schema (.json), JSON lines with a "schema" each (.jsonl), or a folder of such files',
    )
    command.add_argument(
        "--backend",
        nargs="+",
        choices=GRAMMAR_BACKENDS,
        metavar="NAME",
        default=list(GRAMMAR_BACKENDS[1:]),
        help=f"of {', '.join(GRAMMAR_BACKENDS)}",
    )
    command.add_argument("--model", metavar="MODEL", help="whose tokenizer to take (default: the built-in model's)")
    command.add_argument(
        "--walks", type=positive, metavar="N", default=3, help="texts that are made by chance under each schema"
    )
    command.add_argument("--tokens", type=positive, metavar="N", default=200, help="of such a text at most")
    _add_common(command)


def _grammar(args: argparse.Namespace) -> int:
    from trunkline.bench.grammar import Compiler, Schema, measure, read_schemas
    from trunkline.models.hub import find_model

    schemas = list(read_schemas(args.path))
    compiler = Compiler(find_model(args.model or None))
    try:
        for backend in args.backend:  # what takes seconds the first time is loading the library
            measure(compiler, Schema("warm-up", {"type": "null"}), backend, walks=1, most=1, seed=0)
        costs = [
            measure(compiler, schema, backend, walks=args.walks, most=args.tokens, seed=args.seed)
            for backend in dict.fromkeys(args.backend)
            for schema in schemas
        ]
    finally:
        compiler.close()
    return _tell(args, {"costs": [vars(cost) for cost in costs]}, _grammar_tables(costs))


def _grammar_tables(costs: "Sequence[Cost]") -> str:
    from trunkline.bench.report import percentile
    from trunkline.bench.tables import align

    rows: list[Sequence[str]] = [
        ("backend", "compiled", "prepare ms p50/p99", "compile ms p50/p99", "masks", "mask µs p50/p99/max")
    ]
    for backend in dict.fromkeys(cost.asked for cost in costs):
        of_it = [cost for cost in costs if cost.asked == backend]
        good = [cost for cost in of_it if cost.refused is None]
        masks = [seconds for cost in good for seconds in cost.mask_seconds]
        prepares, compiles = [cost.prepare_seconds for cost in good], [cost.compile_seconds for cost in good]
        rows.append(
            (
                backend,
                f"{len(good):,} of {len(of_it):,}",
                "/".join(_scaled(percentile(prepares, rank), 1e3) for rank in (50, 99)),
                "/".join(_scaled(percentile(compiles, rank), 1e3) for rank in (50, 99)),
                f"{len(masks):,}",
                "/".join(_scaled(percentile(masks, rank), 1e6) for rank in (50, 99, 100)),
            )
        )
    refused = [f"{cost.schema}, {cost.asked}: {cost.refused}" for cost in costs if cost.refused is not None]
    more = [f"… and {len(refused) - 10:,} more"] if len(refused) > 10 else []
    return "\n".join([align(rows), *refused[:10], *more])


# ---------------------------------------------------------------- step


def _add_step(kinds: "argparse._SubParsersAction[Parser]") -> None:
    command = add_command(
        kinds,
        "step",
        "measure what one step of the engine takes on this machine, by batch and context",
        _step,
        about="There is no scheduler and no text in it: only the model, attention and sampling. With --profile the whole engine takes"
        " the steps, and what each part of them costs is held against what this machine can read and multiply.",
        examples=(
            "bench step",
            "bench step --profile --output profile.json",
            "bench step --batch-size 1,8,32 --context 128,1K,4K --chunk 128,512 --repeat 10",
            "bench step --model path/to/model --dtype float32 --threads 1",
        ),
        more=SERVE_FLAGS,
    )
    command.set_defaults(take_rest=take_serve_flags)
    command.add_argument("--model", metavar="MODEL", help="(default: the built-in one)")
    profile_step.add_arguments(command)
    command.add_argument(
        "--batch-size",
        type=_counts,
        metavar="N[,N…]",
        help="requests that generate a token each (default: 1,2,4,8,16,32; of a profile 1,8,32)",
    )
    command.add_argument(
        "--context",
        type=_counts,
        metavar="N[,N…]",
        help="tokens in the cache of each request (default: 128,1024; of a profile 512)",
    )
    command.add_argument(
        "--chunk",
        type=_counts,
        metavar="N[,N…]",
        help="tokens of a prompt that one step reads (default: 128,512; of a profile 512)",
    )
    command.add_argument(
        "--repeat",
        type=positive,
        metavar="N",
        help="steps of a kind; the median is told (default: 5; of a profile 20)",
    )
    _add_common(command, seed=False)


def _step(args: argparse.Namespace) -> int:
    from trunkline.bench.steps import Stepper, measure

    profile_step.check(args)
    if args.profile:
        with _llm(args, {"num_speculative_tokens": 0}) as llm:  # a step with drafts has no batch size of its own
            told, text = profile_step.run(args, llm)
        return _tell(args, told, text)
    batches, contexts = args.batch_size or [1, 2, 4, 8, 16, 32], args.context or [128, 1024]
    with _llm(args) as llm:
        worker: Any = llm.engine.worker  # the protocol does not tell how long a request may be
        stepper = Stepper(worker, max_model_len=worker.max_model_len)
        decode, prefill = measure(
            stepper, batches=batches, contexts=contexts, chunks=args.chunk or [128, 512], repeat=args.repeat or 5
        )
    numbers = {"decode": [time._asdict() for time in decode], "prefill": [time._asdict() for time in prefill]}
    return _tell(args, numbers, f"{_decode_table(decode)}\n\n{_prefill_table(prefill)}")


def _decode_table(times: "Sequence[StepTime]") -> str:
    from trunkline.bench.tables import align

    contexts = list(dict.fromkeys(time.context for time in times))
    rows: list[Sequence[str]] = [
        ("decode: batch", *(f"context {context:,}: ms (tokens/s)" for context in contexts)),
    ]
    for batch in dict.fromkeys(time.batch for time in times):
        found = {time.context: time.seconds for time in times if time.batch == batch}
        rows.append((f"{batch}", *(_step_cell(found[context], batch) for context in contexts)))
    return align(rows)


def _prefill_table(times: "Sequence[StepTime]") -> str:
    from trunkline.bench.tables import align

    rows: list[Sequence[str]] = [("prefill: tokens", "behind cached", "ms (tokens/s)")]
    rows += [
        (f"{time.tokens:,}", f"{time.context - time.tokens:,}", _step_cell(time.seconds, time.tokens)) for time in times
    ]
    return align(rows)


def _step_cell(seconds: float | None, tokens: int) -> str:
    return "does not fit" if seconds is None else f"{1000 * seconds:.1f} ({tokens / seconds:,.0f})"


# ---------------------------------------------------------------- quality


def _add_quality(kinds: "argparse._SubParsersAction[Parser]") -> None:
    command = add_command(
        kinds,
        "quality",
        "measure the perplexity of a model on a text, and what formats cost against a baseline",
        _quality,
        examples=(
            "bench quality",
            "bench quality --formats quantization=gguf quantization=int8,kv-cache-dtype=fp8",
            "bench quality README.md --context 256 --windows 4 --baseline dtype=float32",
            "bench quality text.txt --model path/to/model --baseline model=path/to/original",
        ),
        more=SERVE_FLAGS,
    )
    command.set_defaults(take_rest=_take_file_and_serve_flags)
    command.add_argument("--model", metavar="MODEL", help="(default: the built-in one)")
    cli_quality.add_arguments(command)
    _add_common(command, seed=False)


def _take_file_and_serve_flags(args: argparse.Namespace, unknown: Sequence[str]) -> None:
    """What stands alone among the flags is the text, where `trunkline serve` has its model."""
    take_serve_flags(args, unknown, names_model=False)
    args.file, args.serve.model = args.serve.model, None


def _quality(args: argparse.Namespace) -> int:
    return _tell(args, *cli_quality.run(args))


# ---------------------------------------------------------------- offline


def _add_offline(kinds: "argparse._SubParsersAction[Parser]") -> None:
    command = add_command(
        kinds,
        "offline",
        "measure tokens a second of `LLM.generate`, on a batch with a shared prefix, cold and warm",
        _offline,
        examples=(
            "bench offline",
            "bench offline --num-prompts 64 --prefix-len 1024 --input-len 32 --output-len 64",
            "bench offline --model path/to/model --max-num-seqs 32 --no-enable-prefix-caching",
        ),
        more=SERVE_FLAGS,
    )
    command.set_defaults(take_rest=take_serve_flags)
    command.add_argument("--model", metavar="MODEL", help="(default: the built-in one)")
    command.add_argument("--num-prompts", type=positive, metavar="N", default=16, help="in the batch")
    command.add_argument("--prefix-len", type=token_count, metavar="TOKENS", default=512, help="that all prompts share")
    command.add_argument("--input-len", type=positive, metavar="TOKENS", default=32, help="of each prompt's own")
    command.add_argument("--output-len", type=positive, metavar="TOKENS", default=32, help="to be generated for each")
    _add_common(command)


def _offline(args: argparse.Namespace) -> int:
    from trunkline.bench.offline import make_prompts, measure
    from trunkline.sampling import SamplingParams

    if args.prefix_len < 0:
        raise ConfigError(f"--prefix-len is {args.prefix_len}; allowed is 0 and more.")
    sampling = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    with _llm(args) as llm:
        prompts = make_prompts(
            count=args.num_prompts,
            prefix_len=args.prefix_len,
            input_len=args.input_len,
            vocab_size=llm.tokenizer.vocab_size,
            seed=args.seed,
        )
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)  # what is loaded late is loaded now
        cold, warm = measure(prompts, lambda batch: llm.generate(batch, sampling))
    numbers = {
        name: {**one._asdict(), "output_rate": one.output_rate} for name, one in (("cold", cold), ("warm", warm))
    }
    return _tell(args, numbers, _offline_table(cold, warm))


def _offline_table(cold: "Round", warm: "Round") -> str:
    from trunkline.bench.tables import align

    rows: list[Sequence[str]] = [("", "seconds", "prompt tokens", "cached", "in tok/s", "generated", "out tok/s")]
    for name, one in (("cold", cold), ("warm", warm)):
        share = f"{one.cached_tokens:,} ({100 * one.cached_tokens / one.prompt_tokens:.0f} %)"
        rows.append(
            (
                name,
                f"{one.seconds:.2f}",
                f"{one.prompt_tokens:,}",
                share,
                f"{one.prompt_rate:,.0f}",
                f"{one.output_tokens:,}",
                f"{one.output_rate:,.1f}",
            )
        )
    return align(rows)


# ---------------------------------------------------------------- what they have in common


def _add_common(command: argparse.ArgumentParser, *, seed: bool = True) -> None:
    if seed:
        command.add_argument("--seed", type=int, metavar="N", default=0, help="of what is made by chance")
    command.add_argument("--json", action="store_true", help="print every number as JSON instead of the tables")


@contextlib.contextmanager
def _llm(args: argparse.Namespace, changes: dict[str, Any] | None = None) -> "Iterator[LLM]":
    """The engine that the flags describe, but for `changes`."""
    from trunkline.llm import LLM

    model, flags = engine_settings(args.serve, changes or {})
    with LLM(model, **flags) as llm:
        yield llm


def _tell(args: argparse.Namespace, numbers: dict[str, Any], text: str) -> int:
    output: Path | None = getattr(args, "output", None)  # of those that have the flag
    if args.json or output is not None:
        from trunkline.bench.report import platform_facts

        as_json = json.dumps({**numbers, "machine": platform_facts()}, indent=1, ensure_ascii=False)
    print(as_json if args.json else text)
    if output is not None:  # last, so that a full disk costs the file alone
        try:
            output.write_text(as_json + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output is {output}, which cannot be written: {error.strerror}.") from None
    return 0


def _scaled(value: float, factor: float) -> str:
    return NONE if math.isnan(value) else f"{factor * value:,.3g}"


def _counts(text: str) -> list[int]:
    """ "128,1K" is [128, 1024]."""
    counts = [token_count(word) for word in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"is {shown(text)}; allowed are integers of at least 1, such as 128,1K.")
    return counts

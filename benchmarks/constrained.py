"""What following a schema costs, and what it saves: the built-in model, in this process.

    python -m benchmarks.constrained --data ../shared/data/grammar     # under five minutes on two cores
    python -m benchmarks.constrained --pairs 1                         # without the tool calls

Masks: the notes of workload W4, eight at a time, with its schema and without, as many tokens of each text in both. Runs
take turns, with, without, with; the figure is the median over these rounds of the ratio of process CPU time. Forced tokens:
calls of tools that people have written (BFCL) at temperature 0, one after the other, with the tokens that the grammar leaves
no choice about computed together, and one by one. The texts of both must be the same, or the exit status is 1.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.json_lines import read_rows
from trunkline import LLM, Constraint, SamplingParams
from trunkline.bench.cli import make_texts
from trunkline.bench.report import platform_facts
from trunkline.bench.tables import align
from trunkline.bench.texts import Texts
from trunkline.bench.workloads import SCHEMA

AT_A_TIME, NUM_NOTES, NOTE_TOKENS, MOST_TOKENS = 8, 16, 48, 128
TOGETHER, ONE_BY_ONE = "forced tokens together", "forced tokens one by one"


class Run(NamedTuple):
    """Some calls of `chat`: tokens of each text, engine steps, seconds of the process's CPUs."""

    tokens: list[tuple[int, ...]]
    steps: int
    cpu_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def seconds_per_token(self) -> float:
        return self.cpu_seconds / self.num_tokens


def total(runs: Sequence[Run]) -> Run:
    """Several runs as one."""
    tokens = [text for run in runs for text in run.tokens]
    return Run(tokens, sum(run.steps for run in runs), sum(run.cpu_seconds for run in runs))


def chat(llm: LLM, conversations: list[Any], sampling: Sequence[SamplingParams], **options: Any) -> Run:
    """Answer all, `AT_A_TIME` at a time."""
    tokens: list[tuple[int, ...]] = []
    steps, cpu = llm.engine.step_seconds.count, time.process_time()
    for start in range(0, len(conversations), AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        outputs = llm.chat(conversations[part], list(sampling[part]), use_tqdm=False, **options)
        tokens += [output.outputs[0].token_ids for output in outputs]
    return Run(tokens, llm.engine.step_seconds.count - steps, time.process_time() - cpu)


def notes(texts: Texts, opening: str, name: str) -> list[Any]:
    """Conversations like those of W4. Those of different openings share no cached prefix."""
    rng = random.Random(name)
    system = {"role": "system", "content": f"{opening} desk: answer with the note's ticket, as one JSON object."}
    return [[system, {"role": "user", "content": texts.piece(NOTE_TOKENS, rng, first=True)}] for _ in range(NUM_NOTES)]


def mask_ratio(llm: LLM, texts: Texts, name: str) -> float:
    """CPU time of a token that follows the schema over that of a free one, in one round."""
    follows = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, constraint=Constraint(json_schema=SCHEMA))
    before = chat(llm, notes(texts, "North", name), [follows] * NUM_NOTES)
    free = [SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True) for tokens in before.tokens]
    without = chat(llm, notes(texts, "South", name), free)
    after = chat(llm, notes(texts, "East", name), [follows] * NUM_NOTES)  # so that neither is always first
    assert list(map(len, without.tokens)) == list(map(len, before.tokens))
    return total([before, after]).seconds_per_token / without.seconds_per_token


def read_cases(data: Path, most: int) -> list[Any]:
    """Questions with tools, from all over the sample: its kinds stand one after the other."""
    rows = read_rows(data / "bfcl_sample.jsonl")
    return rows[:: max(1, len(rows) // most)][:most]


def tool_calls(llm: LLM, cases: list[Any]) -> Run:
    """A required call for each case."""
    sampling = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    return total(
        [
            chat(llm, [case["question"][0]], [sampling], tools=case["tools_openai"], tool_choice="required")
            for case in cases
        ]
    )


def measure(texts: Texts, pairs: int, seed: int, cases: list[Any]) -> dict[str, Any]:
    """All figures, plain; `same_texts`: whether forced tokens have changed no text, None: no tool was called."""
    flags: dict[str, Any] = {"kv_cache_memory": 2**28, "num_speculative_tokens": 0}
    with LLM(**flags, grammar_forced_tokens=False) as one_by_one, LLM(**flags) as together:
        llms = {ONE_BY_ONE: one_by_one, TOGETHER: together}
        for llm in llms.values():  # warm up: libraries are imported, the schema is compiled
            short = SamplingParams(max_tokens=4, constraint=Constraint(json_schema=SCHEMA))
            chat(llm, notes(texts, "West", "warm up"), [short] * NUM_NOTES)
        ratios: dict[str, list[float]] = {name: [] for name in llms}
        for pair in range(pairs):
            for name, llm in llms.items():
                ratios[name].append(mask_ratio(llm, texts, f"{seed}/{pair}"))
        calls = {name: tool_calls(llm, cases) for name, llm in llms.items()} if cases else {}
    return {
        "masks": {name: {"cpu_ratio": statistics.median(each), "cpu_ratios": each} for name, each in ratios.items()},
        "calls": {
            name: {
                "calls": len(run.tokens),
                "tokens": run.num_tokens,
                "steps": run.steps,
                "steps_ratio": run.steps / calls[ONE_BY_ONE].steps,
                "cpu_ratio": run.cpu_seconds / calls[ONE_BY_ONE].cpu_seconds,
            }
            for name, run in calls.items()
        },
        "same_texts": calls[ONE_BY_ONE].tokens == calls[TOGETHER].tokens if calls else None,
    }


def tables(results: dict[str, Any]) -> str:
    """Markdown, for README.md."""
    rows = [("W4, 8 at a time", "CPU time of a token, with the schema / without", "of each round")]
    for name, one in results["masks"].items():
        rows.append((name, f"{one['cpu_ratio']:.3f}", " ".join(f"{ratio:.2f}" for ratio in one["cpu_ratios"])))
    if not results["calls"]:
        return align(rows)
    calls = [("tool calls, one at a time", "calls", "tokens", "steps", "ratio", "CPU time, ratio")]
    for name, one in results["calls"].items():
        counts = [f"{one[field]:,}" for field in ("calls", "tokens", "steps")]
        calls.append((name, *counts, f"{one['steps_ratio']:.2f}", f"{one['cpu_ratio']:.2f}"))
    return f"{align(rows)}\n\n{align(calls)}"


def main(argv: list[str] | None = None) -> int:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.constrained", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, metavar="N", default=5, help="rounds with and without (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the notes (%(default)s)")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="has bfcl_sample.jsonl")
    parser.add_argument("--cases", type=int, metavar="N", default=51, help="of that sample, at most (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every number to this JSON file as well")
    args = parser.parse_args(argv)
    for flag in ("pairs", "cases"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag} is {getattr(args, flag)}; allowed is 1 or more")
    cases = read_cases(args.data, args.cases) if args.data is not None else []
    results = measure(make_texts(None), args.pairs, args.seed, cases)
    facts = platform_facts()
    print(tables(results))
    print(
        f"\n{facts['cpus']} cores; trunkline {facts['trunkline']}; seed {args.seed}; `python -m benchmarks.constrained`"
    )
    if args.output is not None:
        args.output.write_text(json.dumps({"facts": facts, "results": results}, indent=1, ensure_ascii=False) + "\n")
    if results["same_texts"] is False:
        print("Forced tokens have changed a text.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

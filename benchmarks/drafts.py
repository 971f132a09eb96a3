"""What drafts cost where they are wrong, and what they save where they are right: the built-in model, in this process.

    python -m benchmarks.drafts                  # two to three minutes on two cores
    python -m benchmarks.drafts --pairs 1        # a smoke run

Cold: prompts that nobody asked before, sampled at temperature 1. The same prompts go to an engine without drafts and to
one with drafts, in pairs one after the other, in alternating order; the figure is the median over the pairs of the
ratio of process CPU time. Repeated: questions about documents asked twice at temperature 0; steps and wall time of the
second pass. The texts of both engines are compared, too.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from trunkline import LLM, SamplingParams
from trunkline.bench.cli import make_texts
from trunkline.bench.report import platform_facts
from trunkline.bench.tables import align
from trunkline.bench.texts import Texts

STREAMS = (1, 8)
COLD_TOKENS, ANSWER_TOKENS = 64, 64


class Run(NamedTuple):
    """One call of `generate`: tokens of each text, engine steps, seconds of the process's CPUs and of the wall."""

    tokens: list[tuple[int, ...]]
    steps: int
    cpu_seconds: float
    wall_seconds: float


def measured(llm: LLM, prompts: list[str], sampling: SamplingParams) -> Run:
    steps, cpu, wall = llm.engine.step_seconds.count, time.process_time(), time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    tokens = [output.outputs[0].token_ids for output in outputs]
    return Run(tokens, llm.engine.step_seconds.count - steps, cpu, wall)


def cold(plain: LLM, drafting: LLM, texts: Texts, streams: int, pairs: int, seed: int) -> dict[str, Any]:
    """CPU time with drafts over CPU time without, pair by pair, on new prompts each time."""
    ratios = []
    before = drafted(drafting)
    for pair in range(pairs):
        rng = random.Random(f"{seed}/{streams}/{pair}")
        prompts = [texts.piece(128, rng, first=True) for _ in range(streams)]
        sampling = SamplingParams(temperature=1, max_tokens=COLD_TOKENS, ignore_eos=True, seed=pair)
        order = (plain, drafting) if pair % 2 == 0 else (drafting, plain)
        runs = {id(llm): measured(llm, prompts, sampling) for llm in order}
        assert runs[id(plain)].tokens == runs[id(drafting)].tokens, "drafts have changed a text"
        ratios.append(runs[id(drafting)].cpu_seconds / runs[id(plain)].cpu_seconds)
    after = drafted(drafting)
    return {
        "streams": streams,
        "cpu_ratio": statistics.median(ratios),
        "cpu_ratios": ratios,
        "drafts_per_token": (after["drafts"] - before["drafts"]) / (pairs * streams * COLD_TOKENS),
        "accepted_per_token": (after["accepted"] - before["accepted"]) / (pairs * streams * COLD_TOKENS),
    }


def repeated(plain: LLM, drafting: LLM, texts: Texts, streams: int, seed: int) -> dict[str, Any]:
    """Eight questions about two documents, twice; `streams` at a time."""
    rng = random.Random(f"{seed}/documents/{streams}")
    documents = [texts.piece(512, rng, first=True) for _ in range(2)]
    prompts = [documents[i % 2] + texts.piece(24, rng) for i in range(8)]
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    batches = [prompts[i : i + streams] for i in range(0, len(prompts), streams)]
    passes: dict[str, list[Run]] = {}
    for name, llm in (("plain", plain), ("drafting", drafting)):
        passes[name] = [total([measured(llm, batch, sampling) for batch in batches]) for _ in range(2)]
    assert len({str(run.tokens) for runs in passes.values() for run in runs}) == 1, "drafts have changed a text"
    return {
        "streams": streams,
        "steps_first": passes["drafting"][0].steps,
        "steps_second": passes["drafting"][1].steps,
        "steps_ratio": passes["drafting"][1].steps / passes["drafting"][0].steps,
        "steps_ratio_to_none": passes["drafting"][1].steps / passes["plain"][1].steps,
        "wall_ratio_to_none": passes["drafting"][1].wall_seconds / passes["plain"][1].wall_seconds,
    }


def total(runs: list[Run]) -> Run:
    """Several calls as one."""
    tokens = [text for run in runs for text in run.tokens]
    seconds = [sum(getattr(run, field) for run in runs) for field in ("cpu_seconds", "wall_seconds")]
    return Run(tokens, sum(run.steps for run in runs), *seconds)


def drafted(llm: LLM) -> dict[str, int]:
    stats = llm.engine.stats()
    return {
        "drafts": sum(stats["spec_decode_num_draft_tokens_total"].values()),
        "accepted": sum(stats["spec_decode_num_accepted_tokens_total"].values()),
    }


def tables(results: dict[str, Any]) -> str:
    """Markdown, for README.md."""
    head = ("cold, temperature 1", "CPU time, with drafts / without", "of each pair", "drafts a token", "right")
    rows = [head]
    for one in results["cold"]:
        pairs = " ".join(f"{ratio:.2f}" for ratio in one["cpu_ratios"])
        right = f"{one['accepted_per_token'] / one['drafts_per_token']:.0%}" if one["drafts_per_token"] else "–"
        name = f"{one['streams']} at a time"
        rows.append((name, f"{one['cpu_ratio']:.3f}", pairs, f"{one['drafts_per_token']:.2f}", right))
    head = ("asked again, temperature 0", "steps, first pass", "second", "ratio", "wall time, with drafts / without")
    again = [head]
    for one in results["repeated"]:
        counts = (f"{one['steps_first']}", f"{one['steps_second']}", f"{one['steps_ratio']:.2f}")
        again.append((f"{one['streams']} at a time", *counts, f"{one['wall_ratio_to_none']:.2f}"))
    return f"{align(rows)}\n\n{align(again)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.drafts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, metavar="N", default=7, help="of cold runs (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the texts (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every number to this JSON file as well")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error(f"--pairs is {args.pairs}; allowed is 1 or more")
    texts = make_texts(None)
    with (
        LLM(kv_cache_memory=2**28, num_speculative_tokens=0) as plain,
        LLM(kv_cache_memory=2**28) as drafting,
    ):
        for llm in (plain, drafting):
            measured(llm, [texts.piece(256, random.Random("warm up"), first=True)], SamplingParams(max_tokens=8))
        results = {
            "cold": [cold(plain, drafting, texts, streams, args.pairs, args.seed) for streams in STREAMS],
            "repeated": [repeated(plain, drafting, texts, streams, args.seed) for streams in STREAMS],
        }
    facts = platform_facts()
    print(tables(results))
    print(f"\n{facts['cpus']} cores; trunkline {facts['trunkline']}; seed {args.seed}; `python -m benchmarks.drafts`")
    if args.output is not None:
        args.output.write_text(json.dumps({"facts": facts, "results": results}, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Output tokens per second of our server beside `transformers.generate`, in one run on one machine.

    python -m benchmarks.against_transformers                              # W1, W2 and W6: ten minutes on two cores
    python -m benchmarks.against_transformers --workload W1 --requests 1   # a smoke run

transformers runs float32, with the weights our checkpoint reader dequantizes, one request after another: what a script
does that calls `generate` in a loop. It runs the first requests of each workload only (`--requests`), half of them
before ours and half after, so that a machine which slows down slows both. Ours runs the whole workload over HTTP, in
its default format.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.server import serve
from trunkline.bench import cli
from trunkline.bench.report import platform_facts, summarize
from trunkline.bench.runner import Server
from trunkline.bench.tables import align
from trunkline.bench.texts import Texts
from trunkline.bench.workloads import Turn, Workload, make_workloads, warm_up

WORKLOADS = ("W1", "W2", "W6")


class Peer:
    """transformers with the built-in model's weights, in this process."""

    def __init__(self) -> None:
        from tests.reference_model import load_reference
        from trunkline.models.checkpoint import builtin_model
        from trunkline.models.tokenizer import load_tokenizer

        self._model = load_reference(builtin_model())
        self._tokenizer = load_tokenizer(builtin_model())

    def generate(self, turn: Turn) -> tuple[int, float]:
        """Continue the turn's prompt greedily. Returns tokens written and the seconds it took."""
        import torch

        assert turn.prompt is not None
        ids = torch.tensor([self._tokenizer.encode(turn.prompt, add_special_tokens=False)])
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=turn.max_tokens,
                min_new_tokens=turn.max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return output.shape[1] - ids.shape[1], time.perf_counter() - start


def say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def peer_speed(peer: Peer, turns: list[Turn]) -> tuple[int, float]:
    """Tokens written and seconds taken, in total, one request after another."""
    results = [peer.generate(turn) for turn in turns]
    return sum(tokens for tokens, _ in results), sum(seconds for _, seconds in results)


async def our_run(url: str, workload: Workload, texts: Texts, seed: int) -> dict[str, Any]:
    """Our server's summary of the whole workload."""
    async with Server(url) as server:
        model = await server.model()
        await server.run(warm_up(workload, texts, seed, 1), model)
        return summarize(await server.run(workload, model))


def compare(url: str, peer: Peer, workload: Workload, texts: Texts, seed: int, requests: int) -> dict[str, Any]:
    """One workload on both. `requests` bounds what transformers is given."""
    turns = [session[0] for session in workload.sessions][:requests]
    half = (len(turns) + 1) // 2
    say(f"{workload.name}: transformers, {half} of {len(turns)} requests")
    tokens, seconds = peer_speed(peer, turns[:half])
    say(f"{workload.name}: ours, all {len(workload.sessions)}")
    ours = asyncio.run(our_run(url, workload, texts, seed))
    say(f"{workload.name}: transformers, the other {len(turns) - half}")
    more_tokens, more_seconds = peer_speed(peer, turns[half:])
    theirs = (tokens + more_tokens) / (seconds + more_seconds)
    return {
        "workload": workload.name,
        "title": workload.title,
        "transformers": {"requests": len(turns), "output_tokens_per_second": round(theirs, 2)},
        "trunkline": ours,
        "ratio": round(ours["output_tokens_per_second"] / theirs, 2),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, for README.md."""
    head = ("workload", "transformers tok/s", "of requests", "trunkline tok/s", "of requests", "failed", "ratio")
    rows = [head]
    for one in results:
        theirs, ours = one["transformers"], one["trunkline"]
        row = (
            f"{one['workload']}: {one['title']}",
            f"{theirs['output_tokens_per_second']:.1f}",
            f"{theirs['requests']}",
            f"{ours['output_tokens_per_second']:.1f}",
            f"{ours['requests']}",
            f"{ours['failures']}",
            f"{one['ratio']:.1f}×",
        )
        rows.append(row)
    return align(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.against_transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--requests", type=int, metavar="N", default=8, help="requests that transformers is given of each (%(default)s)"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the texts (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every number to this JSON file as well")
    args = parser.parse_args(argv)
    if args.requests < 1:
        parser.error(f"--requests is {args.requests}; allowed is 1 or more")

    peer = Peer()
    texts = cli.make_texts(None)
    results: list[dict[str, Any]] = []
    with serve() as url:
        for name in args.workload:
            (workload,) = make_workloads(name, texts, args.seed)
            if not results:
                peer.generate(warm_up(workload, texts, args.seed, 1).sessions[0][0])
            results.append(compare(url, peer, workload, texts, args.seed, args.requests))
    facts = platform_facts()
    print(table(results))
    versions = ", ".join(f"{package} {facts[package]}" for package in ("trunkline", "transformers", "torch", "python"))
    print(f"\n{facts['cpus']} cores; {versions}; seed {args.seed}; `python -m benchmarks.against_transformers`")
    if args.output is not None:
        args.output.write_text(json.dumps({"facts": facts, "results": results}, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(one["trunkline"]["failures"] == 0 for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())

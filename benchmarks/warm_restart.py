"""What the disk tier saves after a restart: the time to the first token of an old prompt, out of the files and
computed.

    python -m benchmarks.warm_restart                      # the built-in model, prompts of 512, 1,024 and 2,048 tokens
    python -m benchmarks.warm_restart --tokens 4096

One process serves random prompts twice and ends. A second one is asked for each of them once, and in turn for a new
prompt of the same length, so that what the machine does otherwise falls on both. Medians.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

from trunkline import LLM, SamplingParams
from trunkline.bench.tables import align

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def prompts(num_tokens: int, number: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    rng = random.Random(f"{num_tokens} {seed}")
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(number)]


def seconds(llm: LLM, prompt: list[int]) -> float:
    """Until the first token of the prompt, which nobody waits with."""
    start = time.perf_counter()
    llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
    return time.perf_counter() - start


def measure(model: str | None, lengths: Sequence[int], number: int) -> list[tuple[int, float, float, int]]:
    """For each length: medians of the seconds computed and from disk, and the tokens that came from disk per prompt."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        with LLM(model, disk_cache_dir=folder) as llm:
            vocab_size = llm.engine.vocab_size
            for length in lengths:
                for prompt in prompts(length, number, vocab_size, seed=0):
                    seconds(llm, prompt)
                    seconds(llm, prompt)
        with LLM(model, disk_cache_dir=folder) as llm:
            seconds(llm, prompts(256, 1, vocab_size, seed=1)[0])  # the first step of a process is slower
            hits = llm.engine.scheduler.counters.hits_by_tier
            for length in lengths:
                before = hits["disk"]
                old, new = (prompts(length, number, vocab_size, seed) for seed in (0, 2))
                pairs = [(seconds(llm, cold), seconds(llm, warm)) for cold, warm in zip(new, old, strict=True)]
                computed, loaded = (statistics.median(times) for times in zip(*pairs, strict=True))
                rows.append((length, computed, loaded, (hits["disk"] - before) // number))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.warm_restart", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", help="a folder or a GGUF file (default: the built-in model)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 1024, 2048], metavar="N", help="lengths of the prompts"
    )
    parser.add_argument("--prompts", type=int, default=5, metavar="N", help="of each length")
    args = parser.parse_args(arguments)
    rows = measure(args.model, args.tokens, args.prompts)
    table = [["prompt tokens", "from disk", "computed, s", "from files, s", "ratio"]]
    table += [
        [f"{length:,}", f"{hits:,}", f"{computed:.3f}", f"{loaded:.3f}", f"{loaded / computed:.3f}"]
        for length, computed, loaded, hits in rows
    ]
    print(align(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())

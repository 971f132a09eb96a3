"""The engine end to end, in Qwen3-0.6B's shape; and whether CUDA graphs change a token."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_visit import engine
from benchmarks.gpu_visit.part import Visit

TITLE = "Qwen3-0.6B's shape"

# In a process of its own: an engine takes most of the card's memory.
SCRIPT = """
import json, random, sys
from trunkline import LLM, SamplingParams
folder, device, eager = sys.argv[1:]
rng = random.Random(0)
prompts = [[rng.randrange(250) for _ in range(30 + 40 * index)] for index in range(8)]
llm = LLM(folder, device=device, max_model_len=1024, num_speculative_tokens=0, **({"enforce_eager": True} if eager == "eager" else {}))
outputs = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True), use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def run(visit: Visit) -> None:
    engine.measure(visit, TITLE, engine.QWEN3_600M)
    what = f"{TITLE}: CUDA graphs and eager, greedy"
    with visit.row(what), tempfile.TemporaryDirectory() as name:
        engine.write_model(visit, Path(name), visit.sizes(engine.QWEN3_600M, engine.TINY))
        graphs, eager = (tokens(visit, name, way) for way in ("graphs", "eager"))
        same = sum(a == b for a, b in zip(graphs, eager, strict=True))
        visit.emit(what, same, f"of {len(eager)} texts the same", goal="all", met=same == len(eager))


def tokens(visit: Visit, folder: str, way: str) -> list[list[int]]:
    """What is written with CUDA graphs, or without."""
    command = [sys.executable, "-c", SCRIPT, folder, visit.sizes("cuda", "cpu"), way]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: list[list[int]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found

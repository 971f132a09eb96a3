"""Decoding: bytes of keys and values read per second, beside what a copy moves. Llama-3.1-8B's heads, bfloat16, nothing shared."""

import torch

from benchmarks.gpu_visit.part import Visit
from benchmarks.gpu_visit.scenes import LLAMA_8B, TINY, Asked, Heads, Scene

BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 4096, 16384)
ROTATED_BYTES = 2**30  # of all layers that are read in turn: many times the L2 cache
GOAL = {(64, 4096): 0.85}  # of the copy


def run(visit: Visit) -> None:
    heads = visit.sizes(LLAMA_8B, TINY)
    for context in visit.sizes(CONTEXTS, (40,)):
        for batch in visit.sizes(BATCHES, (2,)):
            what = f"{batch} × {context:,}"
            with visit.row(what):
                measure(visit, what, Asked(contexts=(context,) * batch, new=(1,) * batch), heads)


def measure(visit: Visit, what: str, asked: Asked, heads: Heads) -> None:
    contexts = asked.contexts
    token_bytes = 2 * heads.kv * heads.dim * 2
    layers = min(64, max(1, ROTATED_BYTES // (sum(contexts) * token_bytes)))
    scene = Scene(asked, heads, torch.bfloat16, visit.device, layers=visit.sizes(layers, 1), seed=visit.seed)
    seconds = visit.seconds(scene.launch(scene.plan(shared=False)), calls=max(4, min(layers, 32)))
    rate = sum(contexts) * scene.kv_bytes / seconds
    share = rate / visit.ceilings["copy"] if "copy" in visit.ceilings else None
    goal = GOAL.get((len(contexts), contexts[0]))
    visit.emit(
        what,
        rate / 1e9,
        "GB/s",
        share=share,
        of="the copy",
        goal=f"≥ {goal:.0%} of the copy" if goal else "",
        met=None if goal is None or share is None else share >= goal,
        note=f"{seconds * 1e6:.1f} µs a layer",
    )

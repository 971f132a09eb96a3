"""Prompts: FLOP per second of attention, beside what a large matrix product reaches. Llama-3.1-8B's heads, bfloat16."""

import torch

from benchmarks.gpu_visit.part import Visit
from benchmarks.gpu_visit.scenes import LLAMA_8B, TINY, Asked, Scene

CASES = (
    ("1 × 8,192", Asked(contexts=(8192,), new=(8192,))),
    ("4 × 2,048", Asked(contexts=(2048,) * 4, new=(2048,) * 4)),
    ("512 new behind 8,192", Asked(contexts=(8704,), new=(512,))),
    ("32 × 100 new behind 1,024", Asked(contexts=(1124,) * 32, new=(100,) * 32)),
)
REHEARSED = (("70 new behind 10", Asked(contexts=(80,), new=(70,))),)
GOAL, GOAL_AT = 0.55, "1 × 8,192"  # of the product


def run(visit: Visit) -> None:
    for what, asked in visit.sizes(CASES, REHEARSED):
        with visit.row(what):
            scene = Scene(asked, visit.sizes(LLAMA_8B, TINY), torch.bfloat16, visit.device, seed=visit.seed)
            seconds = visit.seconds(scene.launch(scene.plan(shared=False)))
            rate = scene.flops / seconds
            share = rate / visit.ceilings["matmul"] if "matmul" in visit.ceilings else None
            has_goal = what == GOAL_AT
            visit.emit(
                what,
                rate / 1e12,
                "TFLOP/s",
                share=share,
                of="the matmul",
                goal=f"≥ {GOAL:.0%} of the matmul" if has_goal else "",
                met=share >= GOAL if has_goal and share is not None else None,
                note=f"{seconds * 1e6:.0f} µs a layer",
            )

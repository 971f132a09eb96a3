"""The attention of correctness.py: prompts, decoding, shared runs, windows, soft caps, and what is written into pages."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_visit import correctness
from benchmarks.gpu_visit.part import Visit
from benchmarks.gpu_visit.scenes import Asked, Heads, Scene
from trunkline.kernels.triton import rotary
from trunkline.step import SPLIT

DECODING = Asked(contexts=(1, 17, 512, 513, 1500), new=(1,) * 5)
MIXED = Asked(contexts=(40, 600, 1100, 1, 333), new=(40, 70, 1, 1, 200))
TREE = Asked(
    contexts=(2 * SPLIT + 1, 2 * SPLIT + 30, 2 * SPLIT + 700, 2 * SPLIT + 9),
    new=(1, 5, 1, 1),
    documents=(0, 1, 0, 1),
    prefix=2 * SPLIT,
)
CASES = {"decoding": DECODING, "mixed": MIXED, "tree": TREE}
REHEARSED = {"mixed": Asked(contexts=(40, 3), new=(5, 1))}

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


class Kind(NamedTuple):
    """One of those that attention.specs compiles beforehand: here, compiling takes seconds each."""

    dtype: torch.dtype
    dim: int
    group: int = 4
    page_size: int = 16
    window: int = 0
    soft_cap: float = 0.0

    @property
    def heads(self) -> Heads:
        return Heads(8 * self.group, 8, self.dim)

    def __str__(self) -> str:
        window, soft_cap = (
            f" window {self.window}" * bool(self.window),
            f" soft cap {self.soft_cap:g}" * bool(self.soft_cap),
        )
        return f"{correctness.name(self.dtype)} D{self.dim} G{self.group} P{self.page_size}{window}{soft_cap}"


KINDS = (
    *(Kind(dtype, dim) for dtype in (BFLOAT16, FLOAT16, FLOAT32) for dim in (64, 96, 128, 256)),
    Kind(BFLOAT16, 256, group=2, window=100, soft_cap=5.0),
    Kind(BFLOAT16, 128, group=5, page_size=32, window=100),
    Kind(FLOAT16, 64, group=3, page_size=64, soft_cap=5.0),
    Kind(FLOAT32, 128, group=7, window=100, soft_cap=5.0),
    Kind(BFLOAT16, 64, group=8, page_size=64),
)
REHEARSED_KINDS = (Kind(BFLOAT16, 64, group=1, window=20, soft_cap=5.0),)


def run(visit: Visit) -> None:
    for kind in visit.sizes(KINDS, REHEARSED_KINDS):
        for case, asked in visit.sizes(CASES, REHEARSED).items():
            with visit.row(f"attention {case} {kind}"):
                check(visit, case, asked, kind)
        if (not kind.window and not kind.soft_cap) or visit.rehearsal:
            with visit.row(f"rotate_and_store {kind}"):
                check_pages(visit, kind)


def small_scene(visit: Visit, dtype: torch.dtype) -> Scene:
    return Scene(
        visit.sizes(MIXED, REHEARSED["mixed"]), Heads(4, 2, 64), dtype, visit.device, layers=2, seed=visit.seed
    )


def check(visit: Visit, case: str, asked: Asked, kind: Kind) -> None:
    scene = Scene(asked, kind.heads, kind.dtype, visit.device, layers=2, page_size=kind.page_size, seed=visit.seed)
    launch = scene.launch(scene.plan(shared=True), window=kind.window, soft_cap=kind.soft_cap)
    for tensor in (scene.out, launch.workspace.parts, launch.workspace.logarithms):
        tensor.fill_(math.nan)
    launch(1)
    oracle = scene.oracle(1, window=kind.window, soft_cap=kind.soft_cap)
    correctness.compare(visit, f"attention {case} {kind}", scene.out, oracle, correctness.TOLERANCE[kind.dtype])


def check_pages(visit: Visit, kind: Kind) -> None:
    """RoPE and the norms of q and k, and where keys and values go; nothing else may change."""
    asked, heads, dtype = visit.sizes(MIXED, REHEARSED["mixed"]), kind.heads, kind.dtype
    scene = Scene(asked, heads, dtype, visit.device, layers=2, page_size=kind.page_size, seed=visit.seed)
    width = (heads.query + 2 * heads.kv) * heads.dim
    qkv = correctness.random(visit, sum(asked.new), width, dtype=dtype)
    norms = [correctness.random(visit, heads.dim, dtype=dtype) for _ in range(2)]
    angles = torch.arange(max(asked.contexts))[:, None] / 100 ** (torch.arange(heads.dim // 2) / (heads.dim // 2))
    rope = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    for tensor in (scene.kv.keys, scene.kv.values):
        tensor.nan_to_num_()  # NaN is not equal to itself
    batch = scene.batch(shared=False)
    oracle_kv = replace(scene.kv, keys=_turned(scene.kv.keys), values=_turned(scene.kv.values))
    oracle_qkv = qkv.cpu().double()
    q_norm, k_norm = (weight.cpu().double() for weight in norms)
    correctness.ORACLE.rotate_and_store(
        oracle_qkv, rope, batch, oracle_kv, 1, q_norm=q_norm, k_norm=k_norm, epsilon=1e-5
    )
    on_device = replace(batch, positions=batch.positions.to(visit.device), slots=batch.slots.to(visit.device))
    rotary.rotate_and_store(
        qkv, rope.to(visit.device), on_device, scene.kv, 1, q_norm=norms[0], k_norm=norms[1], epsilon=1e-5
    )
    width, tolerance = heads.query * heads.dim, correctness.TOLERANCE[dtype]
    for part, ours, oracle in (
        ("q", qkv[:, :width], oracle_qkv[:, :width]),
        ("keys", _turned(scene.kv.keys), oracle_kv.keys),
        ("values", _turned(scene.kv.values), oracle_kv.values),
    ):
        correctness.compare(visit, f"rotate_and_store, {part}, {kind}", ours, oracle, tolerance)


def _turned(pool: Tensor) -> Tensor:
    """The reference's pages: [layer, page, page_size, kv_heads, head_dim], float64, on the host."""
    return pool.cpu().double().transpose(2, 3).contiguous()

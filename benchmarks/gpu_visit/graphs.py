"""A CUDA graph replayed gives what the same launches give eagerly, bit by bit, also with other requests than it was captured with."""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from benchmarks.gpu_visit.part import Visit
from benchmarks.gpu_visit.scenes import LLAMA_8B, TINY, Asked, Scene
from trunkline.kernels.interface import Batch
from trunkline.kernels.triton.attention import Work
from trunkline.kernels.triton.kernels import TritonKernels


def run(visit: Visit) -> None:
    for count in visit.sizes((1, 2, 8, 64), (2,)):
        what = f"a layer of {count} requests"
        with visit.row(what):
            check(visit, what, count)


def check(visit: Visit, what: str, count: int) -> None:
    heads = visit.sizes(LLAMA_8B, TINY)
    longest = visit.sizes(3000, 60)
    rng = torch.Generator().manual_seed(visit.seed)
    lengths = [torch.randint(1, longest, (count,), generator=rng).tolist() for _ in range(3)]
    scenes = [
        Scene(
            Asked(contexts=tuple(each), new=(1,) * count), heads, torch.bfloat16, visit.device, seed=visit.seed + index
        )
        for index, each in enumerate(lengths)
    ]
    kernels = TritonKernels(visit.device, torch.bfloat16, query_heads=heads.query, max_model_len=longest)
    width = heads.query * heads.dim
    weight = torch.randn(width, dtype=torch.bfloat16, device=visit.device)

    # One storage for all: a graph keeps the addresses of what it was captured with.
    kv = replace(
        scenes[0].kv,
        keys=torch.cat([scene.kv.keys for scene in scenes], dim=1),
        values=torch.cat([scene.kv.values for scene in scenes], dim=1),
        num_pages=sum(scene.num_pages for scene in scenes),
    )
    first_page, batches = 0, []
    pages = -(-longest // scenes[0].page_size)
    for scene in scenes:
        planned = kernels.plan(scene.batch(shared=False), scene.kv, num_requests=count)
        table = torch.zeros(count, pages, dtype=torch.int32)
        table[:, : planned.page_table.shape[1]] = planned.page_table + first_page
        batches.append(replace(planned, page_table=table))
        first_page += scene.num_pages

    def layer(qkv: Tensor, batch: Batch, out: Tensor, normed: Tensor) -> None:
        kernels.attention(qkv, batch, kv, 0, heads.dim**-0.5, out=out)
        kernels.rms_norm(out, weight, 1e-5, out=normed)

    def on_device(batch: Batch) -> Batch:
        return replace(batch, **{field.name: getattr(batch, field.name).to(visit.device) for field in fields(batch)})

    static, qkv = on_device(batches[0]), scenes[0].qkv.clone()
    out, normed = (torch.empty(count, width, dtype=torch.bfloat16, device=visit.device) for _ in range(2))
    layer(qkv, static, out, normed)  # compiles
    replay = capture(visit, lambda: layer(qkv, static, out, normed))
    same = 0
    for scene, batch in zip(scenes, batches, strict=True):
        eager, eager_normed = torch.empty_like(out), torch.empty_like(normed)
        layer(scene.qkv, on_device(batch), eager, eager_normed)
        qkv.copy_(scene.qkv)
        fill(static, batch)
        out.fill_(torch.nan)
        replay()
        same += torch.equal(normed, eager_normed) and torch.equal(out, eager)
    visit.emit(
        what, same, f"of {len(scenes)} the same", goal="all", met=same == len(scenes), failed=same != len(scenes)
    )


def capture(visit: Visit, work: Callable[[], None]) -> Callable[[], None]:
    if visit.rehearsal:
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def fill(static: Batch, batch: Batch) -> None:
    """What the graph reads, overwritten in place."""
    for name in ("positions", "slots", "query_start", "context_len", "page_table"):
        getattr(static, name).copy_(getattr(batch, name))
    work: Work = static.work
    work.copy_(batch.work)

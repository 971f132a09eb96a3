"""Tree attention beside flat attention: the same requests, with what they share read once, or by each for itself.

Flat has a helper that costs nothing, the L2 cache: so it is also measured with its work ordered so that whoever reads the same
pages does so at the same time. All three give the same bits; that is checked here, too.
"""

import numpy as np
import torch

from benchmarks.gpu_visit.part import Visit
from benchmarks.gpu_visit.scenes import LLAMA_8B, TINY, Asked, Scene
from trunkline.kernels.triton.attention import Work
from trunkline.kernels.triton.worklist import FIELDS
from trunkline.step import SPLIT

ROTATED_BYTES = 2**30  # of what flat reads in one turn over the layers
GOAL, GOAL_AT = 6.0, "64 sharing 4,096 of 4,352"


def alike(requests: int, prefix: int, own: int, documents: int = 1) -> Asked:
    """Requests that take turns with the documents, so that neighbours read different ones."""
    numbers = tuple(request % documents for request in range(requests))
    return Asked(contexts=(prefix + own,) * requests, new=(1,) * requests, documents=numbers, prefix=prefix)


CASES = (
    (GOAL_AT, alike(64, 4096, 256)),
    ("16 sharing 4,096 of 4,352", alike(16, 4096, 256)),
    ("8 sharing 2,048 of 2,176", alike(8, 2048, 128)),
    ("64 sharing 16,384 of 16,640", alike(64, 16384, 256)),
    ("64 on 8 documents of 4,096", alike(64, 4096, 256, documents=8)),
    ("256 on 32 documents of 4,096", alike(256, 4096, 256, documents=32)),
)
REHEARSED = (("4 on 2 documents", alike(4, SPLIT, 20, documents=2)),)


def run(visit: Visit) -> None:
    for what, asked in visit.sizes(CASES, REHEARSED):
        with visit.row(what):
            measure(visit, what, asked)


def measure(visit: Visit, what: str, asked: Asked) -> None:
    heads = visit.sizes(LLAMA_8B, TINY)
    token_bytes = 2 * heads.kv * heads.dim * 2
    layers = visit.sizes(min(64, max(2, ROTATED_BYTES // (sum(asked.contexts) * token_bytes))), 1)
    scene = Scene(asked, heads, torch.bfloat16, visit.device, layers=layers, seed=visit.seed)
    flat, tree = scene.plan(shared=False), scene.plan(shared=True)
    ways = {"flat": flat, "flat, side by side": side_by_side(flat, scene), "tree": tree}
    seconds, results = {}, {}
    for name, work in ways.items():
        launch = scene.launch(work)
        scene.out.fill_(torch.nan)
        launch(0)
        results[name] = scene.out.clone()
        seconds[name] = visit.seconds(launch, calls=max(4, min(layers, 32)))
    same = all(torch.equal(result, results["flat"]) for result in results.values())
    honest = min(seconds["flat"], seconds["flat, side by side"])
    has_goal = what == GOAL_AT
    visit.emit(
        what,
        seconds["flat"] / seconds["tree"],
        "× flat",
        goal=f"≥ {GOAL:g} × flat" if has_goal else "",
        met=seconds["flat"] / seconds["tree"] >= GOAL if has_goal else None,
        failed=not same,
        note=", ".join(f"{name} {each * 1e6:.1f} µs" for name, each in seconds.items())
        + f"; {honest / seconds['tree']:.2f} × the better flat; {'the same bits' if same else 'the bits DIFFER'}",
    )


def side_by_side(work: Work, scene: Scene) -> Work:
    """The same items in another order: by the page that they begin with."""
    counts = np.array([len(work.section(f"splits{kind}")) // FIELDS for kind in range(len(work.capacity.splits))])
    ordered = work.to("cpu")
    buffer = ordered.buffer.clone()
    for kind in np.flatnonzero(counts):
        section = work.section(f"splits{kind}")
        items = section.numpy().reshape(-1, FIELDS)
        pages = scene.page_table[items[:, 2], items[:, 3] // scene.page_size]
        start = section.storage_offset()
        moved = items[np.lexsort((items[:, 2], pages, items[:, 3]))]
        buffer[start : start + moved.size] = torch.from_numpy(moved.ravel().copy())
    return type(work)(
        buffer=buffer,
        **{name: getattr(work, name) for name in work.__slots__ if name != "buffer"},
    )

"""What this GPU can do at most, measured: a copy on the device, and a product of large bfloat16 matrices."""

import torch

from benchmarks.gpu_visit.part import Visit, discard


def run(visit: Visit) -> None:
    size = visit.sizes(2**32, 2**20)
    source = torch.randint(-128, 128, (size,), dtype=torch.int8, device=visit.device)
    target = torch.empty_like(source)
    seconds = visit.seconds(lambda _: discard(target.copy_(source)), calls=4)
    visit.emit("copy", 2 * size / seconds / 1e9, "GB/s", note=f"{size:,} bytes, read and written both counted")
    source = target = torch.empty(0)  # gives the memory back

    side = visit.sizes(8192, 64)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=visit.device) for _ in range(2))
    out = torch.empty_like(a)
    seconds = visit.seconds(lambda _: discard(torch.matmul(a, b, out=out)), calls=8)
    # In GFLOP/s, as __main__ reads both ceilings in units of 10⁹.
    visit.emit("matmul", 2 * side**3 / seconds / 1e9, "GFLOP/s", note=f"{side}³, random bfloat16")

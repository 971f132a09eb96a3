"""All kernels for this GPU, compiled beforehand by many processes: what is measured afterwards is not the compiler."""

import os
import subprocess
import sys
import time

import torch

from benchmarks.gpu_visit.part import Visit
from trunkline.kernels.triton.tiles import arch_of


def run(visit: Visit) -> None:
    if visit.rehearsal:
        visit.emit("all kernels", note="the interpreter compiles nothing")
        return
    arch = arch_of(visit.device)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    command = [sys.executable, "-m", "benchmarks.kernels_aot", "--arch", str(arch), "--quick"]
    started = time.monotonic()
    processes = max(2, (os.cpu_count() or 4) - 2)
    done = subprocess.run([*command, "--processes", str(processes)], check=False, capture_output=True, text=True)
    took = time.monotonic() - started
    first = (done.stdout.strip() or done.stderr.strip()).splitlines()[0]
    note = f"sm_{arch} on a chip of {capability}, {processes} processes; {first}"
    visit.emit("all kernels", took, "s", failed=done.returncode != 0, note=note)

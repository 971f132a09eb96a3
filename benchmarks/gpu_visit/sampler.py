"""The sampler on the device: the host never waits for it, and it chooses what the one on the CPU chooses."""

import time

import numpy as np
import torch

from benchmarks.gpu_visit.part import Visit
from trunkline.sampling import SamplingParams
from trunkline.step import LogitsRow
from trunkline.workers import sampler
from trunkline.workers.device_sampler import DeviceSampler

SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=40),
    SamplingParams(temperature=1.2, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.95, presence_penalty=0.5, frequency_penalty=0.3),
)


def run(visit: Visit) -> None:
    vocab_size = visit.sizes(128_256, 300)
    for count in visit.sizes((1, 8, 64, 256), (6,)):
        what = f"{count} rows of {vocab_size:,}"
        with visit.row(what):
            check(visit, what, count, vocab_size)


def check(visit: Visit, what: str, count: int, vocab_size: int) -> None:
    torch.manual_seed(visit.seed)
    rows = [make_row(index, SETTINGS[index % len(SETTINGS)], vocab_size) for index in range(count)]
    logits = 4 * torch.randn(count, vocab_size)
    on_device = logits.to(visit.device)
    device_sampler = DeviceSampler(vocab_size, count, visit.device)
    device_sampler.to_host(device_sampler.sample(on_device, device_sampler.prepare(rows)))  # compiles, and makes room
    if not visit.rehearsal:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    started = time.perf_counter()
    try:
        host = device_sampler.to_host(device_sampler.sample(on_device, device_sampler.prepare(rows)))
    finally:
        if not visit.rehearsal:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    ours, oracle = device_sampler.fetch(host), sampler.sample(logits, rows)
    same = int((ours.token_ids == oracle.token_ids).sum())
    visit.emit(
        what,
        same / count * 100,
        "% chosen as on the CPU",
        goal="100 %, without a wait",
        met=same == count,
        failed=same != count,
        note=f"{seconds * 1e6:.0f} µs with the host's part",
    )


def make_row(index: int, params: SamplingParams, vocab_size: int) -> LogitsRow:
    rng = np.random.default_rng(index)
    text = rng.integers(0, vocab_size, 20).astype(np.int32) if params.penalizes else None
    return LogitsRow(
        request=index,
        at=index,
        position=10 + index,
        sampling=params,
        seed=1000 + index,
        logprobs=2,
        prompt=text,
        output=text,
    )

"""The worker on a GPU: it prepares step n+1 while the device computes step n.

    worker = GpuWorker(runner, sampler, device, num_pages=…)
    handle = worker.submit(plan)      # returns at once
    result = worker.wait(handle)      # waits for this step's results, and for nothing else

What one step is, by who does it:

    caller         submit                                                                                wait
    its thread           check, pack ─ launch forward ─ wait for masks ─ launch sampling, copy out
    stream                    pages, inputs ─▶ forward ─────────────────▶ sampling ─▶ results ─▶ event
    copy stream                                           masks ─▶

Everything on the stream is in order, so a page that one step reads is not written by a later one before that. The host
learns what was chosen only in `wait`: until then tokens stay on the device (GpuRunner.chosen).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.interface import Batch
from trunkline.models.tokenizer import Tokenizer
from trunkline.step import LogitsRow, Masks, Plan, StepResult
from trunkline.workers.device import Device, Event
from trunkline.workers.gpu_runner import GpuRunner
from trunkline.workers.pooling import unsound
from trunkline.workers.sampler import Samples
from trunkline.workers.step_inputs import StepInputs
from trunkline.workers.step_thread import Handle, StepThread
from trunkline.workers.worker import check_rows, find_orphans

FIRST_CAPACITY = 2**16  # numbers of a step's masks; it grows
NOTHING = Samples(np.empty(0, np.int32), (), {}, {})


class Sampler(Protocol):
    """What the worker asks of a sampler; see device_sampler.DeviceSampler."""

    def prepare(self, rows: Sequence[LogitsRow], *, num_previous: int = 0) -> Any: ...
    def sample(self, logits: Tensor, prepared: Any, masks: Tensor | None, previous: Tensor | None) -> Any: ...
    def to_host(self, samples: Any) -> Any: ...
    def fetch(self, samples: Any) -> Samples: ...


@dataclass(eq=False, slots=True)
class _Step:
    """A step that was handed to the device.

    previous  the one whose choices it may read, until its result is known
    results   what the sampler fetches, once it is done; nothing for a step without rows
    pooled    the sums of hidden states, in pinned memory; None for a step that wants none
    """

    plan: Plan
    previous: "_Step | None"
    started: Event
    copied: Event
    done: Event
    results: list[Any]
    pooled: Tensor | None = None
    result: StepResult | None = None


class GpuWorker:
    """A Worker (see trunkline/step.py) whose device computes while the host plans.

    The attributes are those of worker.LocalWorker.
    """

    def __init__(
        self,
        runner: GpuRunner,
        sampler: Sampler,
        device: Device,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        depth: int = 1,
        num_host_slots: int = 0,
        fingerprint: str = "",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = runner.page_bytes(page_size)
        self._slots = device.pinned((num_host_slots, self.page_bytes), torch.uint8)
        self.host_pages = self._slots.numpy()
        self.fingerprint = fingerprint
        self.depth = depth
        self.dtype = runner.dtype
        self.device = runner.device
        self.vocab_size = runner.config.vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self._runner = runner
        self._sampler = sampler
        self._device = device
        device.synchronize()  # with what was loaded on other streams
        self._stream, self._copy_stream = device.new_stream(), device.new_stream()
        self._masks = StepInputs(device, FIRST_CAPACITY)
        self._thread = StepThread[_Step]()
        self._previous: _Step | None = None  # the step started last; only the thread touches it
        self._sampling: Event | None = None  # behind the newest sampling
        self._closed = False

    def submit(self, plan: Plan) -> Handle[_Step]:
        """Start the step, or queue it behind the one that runs."""
        return self._thread.submit(self._start, plan, depth=self.depth)

    def wait(self, handle: Handle[_Step]) -> StepResult:
        """The result; a wait that is interrupted may be repeated.

        Raises ValueError, before anything is computed, for a plan that contradicts itself or leaves the KV storage, and
        RuntimeError if the device failed.
        """
        step: _Step | None = None
        try:
            step = handle.result()
            return self._finish(step)
        except Exception:
            self._thread.finished(handle)
            raise
        finally:
            if step is not None and step.result is not None:
                self._thread.finished(handle)

    def close(self) -> None:
        """Let the steps that run end, drop the others, and give the memory back."""
        self._thread.close()
        if not self._closed:
            self._closed = True
            self._device.synchronize()
            self._runner.close()

    # ---------------------------------------------------------------- on the thread

    def _start(self, plan: Plan) -> _Step:
        """Hand the whole step to the device."""
        previous, self._previous = self._previous, None  # if this step raises, so does the next that builds on it
        check_rows(plan)
        if previous is None and (plan.token_ids < 0).any():
            raise ValueError(f"Step {plan.step} builds on a step that did not end well.")
        num_previous = 0 if previous is None else len(previous.plan.rows)
        batch = self._runner.check(plan, num_previous) if plan.num_tokens else None
        with self._device.on(self._stream):
            started = self._device.record()
            for copy in plan.copies:
                self._runner.copy_pages(copy, self._slots)
            copied = self._device.record() if plan.copies else started
            pooled = self._room_for_sums(plan)
            results = [] if batch is None else self._compute(plan, batch, num_previous, pooled)
            step = _Step(plan, previous, started, copied, self._device.record(), results, pooled)
        if batch is not None:
            self._previous = step
        return step

    def _room_for_sums(self, plan: Plan) -> Tensor | None:
        if not plan.pooled:
            return None
        return self._device.pinned((len(plan.pooled), self._runner.config.hidden_size), torch.float64)

    def _compute(self, plan: Plan, batch: Batch, num_previous: int, pooled: Tensor | None) -> list[Any]:
        """Enqueue forward, sums and sampling. What `fetch` wants is in the list when the device has come so far."""
        forward = self._runner.prepare(plan, batch)
        logits: list[Tensor] = []
        results: list[Any] = []

        def compute() -> None:
            logits.append(forward())
            if pooled is not None:
                pooled.copy_(self._runner.pool(plan), non_blocking=True)

        self._device.launch(compute)
        if not plan.rows:
            return results
        prepared = self._sampler.prepare(plan.rows, num_previous=num_previous)
        masks = self._upload(plan.masks)
        chosen = self._runner.chosen

        def choose() -> None:
            samples = self._sampler.sample(logits.pop(), prepared, masks, chosen[:num_previous])
            chosen[: len(plan.rows)].copy_(samples.token_ids)
            results.append(self._sampler.to_host(samples))

        self._device.launch(choose)
        self._sampling = self._device.record()
        return results

    def _upload(self, masks: Masks | None) -> Tensor | None:
        """Wait for the masks, which are filled while the device computes, and bring them there beside it."""
        if masks is None:
            return None
        words = torch.from_numpy(np.ascontiguousarray(masks.wait(), np.int32))
        with self._device.on(self._copy_stream):
            if self._sampling is not None:  # it reads the masks that were there until now
                self._device.wait_for(self._sampling)
            on_device = self._masks.upload(words)
            uploaded = self._device.record()
        self._device.wait_for(uploaded)
        return on_device

    # ---------------------------------------------------------------- on the caller's

    def _finish(self, step: _Step) -> StepResult:
        if step.result is None:
            earlier = self._finish(step.previous) if step.previous is not None else None
            step.done.synchronize()
            seconds = self._device.seconds_between(step.started, step.copied) if step.plan.copies else 0.0
            samples = self._sampler.fetch(step.results[0]) if step.results else NOTHING
            orphans = {} if earlier is None else find_orphans(step.plan, earlier)
            pooled = step.pooled.numpy() if step.pooled is not None else None
            logprobs = list(samples.logprobs)
            for index in orphans:
                samples.token_ids[index] = -1
                logprobs[index] = None
            step.result = StepResult(
                step=step.plan.step,
                token_ids=samples.token_ids,
                logprobs=tuple(logprobs),
                failed=samples.failed | orphans | (unsound(pooled, step.plan) if pooled is not None else {}),
                copy_seconds=seconds,
                fallback_logprobs=samples.fallback_logprobs,
                pooled=pooled,
            )
            step.previous = None
        return step.result

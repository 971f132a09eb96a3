"""`trunkline bench step --profile`: which steps are taken apart, and on what."""

import argparse
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline.bench.output_file import check_output
from trunkline.errors import ConfigError

if TYPE_CHECKING:
    from trunkline.kernels.limits import Machine
    from trunkline.llm import LLM
    from trunkline.profiling.profile import StepProfile

logger = logging.getLogger(__name__)

BUSY = 0.5  # load average
CHUNK_SHARE = 4  # of the steps that are asked for, one in so many: they take that much longer
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
}  # a text that does not end soon


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile", action="store_true", help="where a step's time goes, against the machine's own limits"
    )
    command.add_argument("--output", type=Path, metavar="FILE", help="write every number to this JSON file as well")


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what would fail after minutes; warns of what would mislead."""
    if args.output is not None:
        check_output("--output", args.output)
    if args.profile and (load := os.getloadavg()[0]) > BUSY:
        logger.warning(
            "Other programs use this machine (load average %.1f): times and limits are worse than they could be.", load
        )


def run(args: argparse.Namespace, llm: "LLM") -> tuple[dict[str, Any], str]:
    """Profiles as numbers and as text: decode steps of every batch and context, then those of the largest batch under a JSON schema,
    then the chunks of a prompt.

    Raises ConfigError where the model does not run on the CPU, in this process, and at once for sizes that the engine can't take.
    """
    from trunkline.constraint import Constraint
    from trunkline.grammar.prepare import prepare
    from trunkline.kernels.limits import beyond_caches, measure_reading
    from trunkline.profiling.profile import with_best_limits
    from trunkline.profiling.profiler import Profiler
    from trunkline.profiling.report import numbers, report
    from trunkline.workers.worker import LocalWorker

    worker = llm.engine.worker
    if not isinstance(worker, LocalWorker) or worker.depth:
        device = getattr(worker, "device", "another device")
        raise ConfigError(
            f"--profile takes steps apart that run on the CPU in one process; these run on {device}. Please use --device cpu and"
            " --tensor-parallel-size 1."
        )
    batches, contexts, chunks = args.batch_size or [1, 8, 32], args.context or [512], args.chunk or [512]
    steps = args.repeat or 20
    machine = _machine(worker)
    grammar = prepare(Constraint(json_schema=json.dumps(SCHEMA))).grammar
    head = [f"{llm.engine.vocab_size:,} tokens of vocabulary, weights {worker.dtype}, on {worker.device}."]
    told: dict[str, Any] = {"dtype": worker.dtype, "device": worker.device}
    if machine is not None:
        size = beyond_caches()
        told["memory"] = {"bytes": size, "read_rate": measure_reading(machine, size)}
        head.append(
            f"Memory is read at {told['memory']['read_rate'] / 1e9:.1f} GB/s ({size / 1e6:,.0f} MB, 2 MB pages)."
        )
    found: dict[str, StepProfile | None] = {}
    with Profiler(llm.engine, worker, machine, max_model_len=worker.max_model_len) as profiler:
        profiler.check(batches=batches, contexts=contexts, chunks=chunks, steps=steps)
        for context in contexts:
            for batch in batches:
                name = f"{batch:,} requests at context {context:,}"
                found[name] = profiler.decode(batch=batch, context=context, steps=steps)
            name = f"{max(batches):,} requests at context {context:,} under a JSON schema"
            found[name] = profiler.decode(batch=max(batches), context=context, steps=steps, grammar=grammar)
        for chunk in chunks:
            found[f"A prompt of {chunk:,} tokens"] = profiler.prefill(tokens=chunk, steps=-(-steps // CHUNK_SHARE))
    memory_rate = told["memory"]["read_rate"] if machine is not None else 0.0
    profiles = iter(with_best_limits([profile for profile in found.values() if profile is not None], memory_rate))
    best = {name: None if profile is None else next(profiles) for name, profile in found.items()}
    told["steps"] = [numbers(profile) for profile in best.values() if profile is not None]
    texts = [
        f"{name}: does not fit into the KV cache." if profile is None else report(profile)
        for name, profile in best.items()
    ]
    return told, "\n\n".join(["\n".join(head), *texts])


def _machine(worker: Any) -> "Machine | None":
    """With as many threads as the kernels have; None if they are not compiled."""
    from trunkline.kernels.build import BuildError
    from trunkline.kernels.limits import Machine
    from trunkline.kernels.select import available_cores

    try:
        return Machine(getattr(worker.runner.kernels, "threads", available_cores()))
    except BuildError as error:
        logger.warning("What the machine can do is not measured: %s.", error)
        return None

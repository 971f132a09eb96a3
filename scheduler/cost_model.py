"""What a step costs on a given machine, in seconds: a formula over its plan. Knows no clock, and runs nothing."""

from dataclasses import dataclass

import numpy as np

from trunkline.errors import ConfigError
from trunkline.step import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds of a step, of what is in it; and what the machine serves best with.

    step            + each step: launching it, reading the weights
    prompt_token    + each token of a prompt, times (1 + context / far_context)
    far_context     tokens of context with which a prompt's token costs twice as much as with none
    sequence        + each sequence that generates
    context_token   + each token that a generating sequence has in the cache and reads

    kv_bytes_per_token      of memory
    max_num_batched_tokens  what this machine is served with, unless somebody says otherwise
    """

    step: float
    prompt_token: float
    far_context: float
    sequence: float
    context_token: float
    kv_bytes_per_token: int
    max_num_batched_tokens: int

    def seconds(self, plan: Plan) -> float:
        """The time that the step takes. A request with one token in it generates; one with more reads."""
        num_new = np.diff(plan.query_start)
        context = plan.context_len
        reads = num_new > 1
        middle = context[reads] - num_new[reads] / 2  # the context that the tokens of a chunk have on average
        reading = float((num_new[reads] * (1 + middle / self.far_context)).sum())
        generating = len(context) - int(reads.sum())
        return (
            self.step
            + self.prompt_token * reading
            + self.sequence * generating
            + self.context_token * int(context[~reads].sum())
        )


# Measured, or put together from published figures. docs/simulator.md says how, and how to make one for another machine.
PROFILES = {
    # Llama 3.1 8B in bfloat16 on one H100: about 50,000 tokens a second of prompts; 128 KiB of KV a token.
    "h100-llama8b": CostModel(
        step=10e-3,
        prompt_token=20e-6,
        far_context=65536,
        sequence=60e-6,
        context_token=0.4e-9,
        kv_bytes_per_token=32 * 8 * 128 * 2 * 2,
        max_num_batched_tokens=8192,
    ),
    # The built-in SmolLM2 135M on two cores of an AMD EPYC, fitted to W1, W2, W4u and W5 of benchmarks/README.md.
    "cpu-smollm2": CostModel(
        step=11.2e-3,
        prompt_token=1.2e-3,
        far_context=3000,
        sequence=1.2e-3,
        context_token=0.57e-6,
        kv_bytes_per_token=30 * 3 * 64 * 2 * 2,
        max_num_batched_tokens=512,
    ),
}


def profile(name: str) -> CostModel:
    """The cost model of that name. Raises ConfigError if there is none."""
    if name not in PROFILES:
        raise ConfigError(f"--profile is {name!r}; allowed is one of {', '.join(PROFILES)}.")
    return PROFILES[name]

"""The whole engine on the Triton kernels, in the interpreter: the tokens of the CPU backend."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import save_tiny
from tests.models.test_architectures import PROMPT
from tests.scheduler.factories import generate
from tests.tiny import tiny_model
from trunkline.constraint import Constraint
from trunkline.grammar.prepare import prepare
from trunkline.llm import LLM
from trunkline.messages import Abort, Failed, Tokens
from trunkline.sampling import SamplingParams
from trunkline.step import SPLIT, Plan

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 640
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["cm", "mm"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
ABORTED = "request 2"


def play(llm: LLM) -> tuple[dict[str, list[int]], int]:
    """Eight requests with a common beginning, one under a schema, one given up: tokens of each, and shared runs seen."""
    engine, prefix = llm.engine, llm.tokenizer.encode("hello world, that is the thing. " * 60)[: SPLIT + 9]
    assert len(prefix) == SPLIT + 9
    grammar = prepare(Constraint(json_schema=SCHEMA)).grammar
    num_shared, submit = 0, engine.worker.submit

    def submit_and_count(plan: Plan) -> Any:
        nonlocal num_shared
        num_shared += len(plan.shared)
        return submit(plan)

    engine.worker.submit = submit_and_count  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = defaultdict(list)

    def take(messages: list[Any]) -> None:
        for message in messages:
            assert not isinstance(message, Failed), message
            if isinstance(message, Tokens):
                tokens[message.request_id] += message.token_ids

    take(engine.handle(generate("request 0", [*prefix, 65], max_tokens=1)))
    while engine.has_work:
        take(engine.step())
    for index in range(1, 8):
        prompt = [*prefix, *llm.tokenizer.encode(f" question {index}?"[: 4 + index])]
        if index == 5:
            ask = generate(f"request {index}", prompt, grammar=grammar, max_tokens=20, ignore_eos=False)
        else:
            ask = generate(f"request {index}", prompt, max_tokens=3 + index % 4)
        take(engine.handle(ask))
    while engine.has_work:
        take(engine.step())
        if len(tokens[ABORTED]) >= 2:
            take(engine.handle(Abort(request_id=ABORTED)))
    engine.scheduler.check()
    return tokens, num_shared


def test_the_same_tokens_as_on_the_cpu(tmp_path: Path) -> None:
    """With a step in flight, prompts read eagerly, and tokens decoded by what would be CUDA graphs on a GPU."""
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=MAX_MODEL_LEN)

    def llm(device: str) -> LLM:
        return LLM(str(model), device=device, dtype="float32", num_pages=120, max_num_seqs=8, threads=1)

    with llm("cpu") as on_cpu:
        expected, _ = play(on_cpu)
    with llm("cuda") as on_triton:
        tokens, num_shared = play(on_triton)
        text = on_triton.tokenizer.decode(tokens["request 5"])
    assert {name: ids for name, ids in tokens.items() if name != ABORTED} == {
        name: ids for name, ids in expected.items() if name != ABORTED
    }
    assert tokens[ABORTED][:2] == expected[ABORTED][:2] and len(tokens) == 8 and len(tokens["request 7"]) == 6
    assert json.loads(text)["unit"] in ("cm", "mm")
    assert num_shared > 0, "attention read the common beginning once for several requests"


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "phi3", "qwen3_moe", "smollm3"])
def test_each_architecture_gives_the_same_tokens(tmp_path: Path, architecture: str) -> None:
    """Windows, soft caps, norms of heads, parts of heads that RoPE turns, experts; a prompt longer than a window, and its second half again."""
    model = save_tiny(architecture, tmp_path / "tiny")
    prompts = [PROMPT, [*PROMPT[:24], 7, 8, 9]]
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(str(model), device=device, dtype="float32", num_pages=60, max_num_seqs=4, threads=1) as llm:
            outputs = [
                llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)) for prompt in prompts
            ]
            answers.append([output.outputs[0].token_ids for (output,) in outputs])
    assert answers[0] == answers[1]

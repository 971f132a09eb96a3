"""What `LLM` and `AsyncLLM` are given: prompts, and how they are continued if nobody says. Knows no engine.

Callers of the Python API are not parsed by a schema as those of the HTTP API are: what they pass is checked here, in
sentences.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict

from trunkline.errors import InvalidParameter
from trunkline.sampling import INT32_MAX, SamplingParams


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TokensPrompt

GENERATE_DEFAULT = SamplingParams(max_tokens=16)
CHAT_DEFAULT = SamplingParams(max_tokens=256)
NOTHING = SamplingParams(max_tokens=0, temperature=0)  # read the prompt only


def as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of them. Raises InvalidParameter for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]  # a TokensPrompt
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise InvalidParameter.of("prompts", prompts, "a prompt, or a list of prompts")
    batch: list[Any] = list(prompts)
    return [batch] if batch and isinstance(batch[0], Integral) else batch


def token_ids_of(prompt: Sequence[int] | TokensPrompt) -> list[int]:
    """The ids of a prompt that is not text; integers of NumPy and PyTorch will do.

    Raises InvalidParameter for anything else. Whether the model has such ids is checked by those who know the model.
    """
    given: Any = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray):
        try:
            return [operator.index(token_id) for token_id in given]
        except TypeError:
            pass  # not all of them are integers
    raise InvalidParameter.of("prompt", prompt, "a text, a list of token ids, or {'prompt_token_ids': [...]}")


def checked_sampling(given: Any) -> SamplingParams:
    """Raises InvalidParameter for what is no SamplingParams."""
    if not isinstance(given, SamplingParams):
        raise InvalidParameter.of("sampling_params", given, "SamplingParams, such as SamplingParams(temperature=0)")
    return given


def check_writes(has_head: bool, sampling: SamplingParams) -> None:
    """Raises InvalidParameter if tokens, or how likely they are, are wanted of a model without an output layer."""
    if not has_head and (sampling.max_tokens != 0 or sampling.prompt_logprobs is not None):
        raise InvalidParameter(
            "This model has no output layer, so it writes no text: it is there for /v1/embeddings, /v1/rerank and /v1/score."
        )


def check_labels(request_id: Any, priority: Any, cache_salt: Any) -> None:
    """Raises InvalidParameter for what cannot be sent to the engine, or what the engine could not read."""
    for param, text in (("request_id", request_id), ("cache_salt", cache_salt)):
        if not isinstance(text, str) or _has_half_pairs(text):
            raise InvalidParameter.of(param, text, "a string of whole Unicode characters")
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > INT32_MAX:
        raise InvalidParameter.of("priority", priority, f"an integer from {-INT32_MAX} to {INT32_MAX}")


def _has_half_pairs(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)

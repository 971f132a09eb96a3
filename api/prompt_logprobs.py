"""`prompt_logprobs` of an answer, in vLLM's shape: how likely the model found each token of the prompt.

[null,                                                                 the first token, which nothing predicts
 {"216": {"logprob": -2.1, "rank": 3, "decoded_token": " "},           the second, by its id; rank 1 is the likeliest of all
  "28": {"logprob": -0.9, "rank": 1, "decoded_token": ","}}, …]        and beside it the likeliest ones there
"""

from typing import Any

from trunkline.api.generation import OutputProcessor
from trunkline.outputs import Candidate


def prompt_logprobs(choice: OutputProcessor, num_alternatives: int) -> list[dict[str, Any] | None]:
    """One entry per token of the choice's prompt: the token's own, then so many of the likeliest, as far as they are others."""
    entries: list[dict[str, Any] | None] = [None]
    for position in choice.prompt_logprobs or ():
        entry = {str(position.chosen.token_id): _scored(position.chosen, position.rank)}
        for rank, candidate in enumerate(position.top[:num_alternatives], 1):
            entry.setdefault(str(candidate.token_id), _scored(candidate, rank))
        entries.append(entry)
    return entries


def _scored(candidate: Candidate, rank: int) -> dict[str, Any]:
    return {"logprob": candidate.logprob, "rank": rank, "decoded_token": candidate.text}

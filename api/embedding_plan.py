"""What a caller wants of an embedding, and the last step to it: from what the engine pools to the numbers that are sent.

    plan = EmbeddingPlan.of(checkpoint.pooling, 576, pooling="mean")     # refuses what the model was not made for
    plan.pooling                                                         # "mean": what the engine is told
    plan.finish(output.embedding)                                        # float32 [576], of unit length

For the HTTP routes and `LLM` alike; knows no engine and no texts.
"""

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from trunkline.config import POOLINGS
from trunkline.errors import InvalidParameter
from trunkline.models.pooling import PoolingSettings

Vector = npt.NDArray[np.float32]


class EmbeddingPlan(NamedTuple):
    """How embeddings are made.

    pooling    one of config.POOLINGS
    normalize  make unit length of them
    length     numbers of each
    """

    pooling: str
    normalize: bool
    length: int

    @classmethod
    def of(
        cls,
        settings: PoolingSettings,
        hidden_size: int,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> Self:
        """What is left open is as the checkpoint says.

        Raises InvalidParameter for what the checkpoint was not made for, or what is not built.
        """
        if settings.unbuilt:
            raise InvalidParameter(
                f"This model's embeddings go through {', '.join(settings.unbuilt)} (by its modules.json), which this server does"
                " not have: others would be wrong. Serve another model for embeddings."
            )
        chosen = settings.method if pooling is None else pooling
        if chosen not in POOLINGS:
            if pooling is None:
                raise InvalidParameter(
                    f"This checkpoint asks for {chosen} pooling, which a decoder's hidden states are of no use for; allowed is"
                    f" {_either()}. Name one of them, here or by --pooling.",
                    param="pooling",
                )
            raise InvalidParameter.of("pooling", pooling, _either())
        return cls(
            chosen,
            settings.normalize if normalize is None else normalize,
            hidden_size if dimensions is None else _checked(dimensions, settings, hidden_size),
        )

    def finish(self, pooled: bytes) -> Vector:
        """float32 [length], of what the engine pooled: float32 little-endian [hidden size]."""
        vector = np.frombuffer(pooled, "<f4")[: self.length].astype(np.float64)
        if self.normalize and (norm := np.linalg.norm(vector)) > 0:
            vector /= norm
        return vector.astype(np.float32)


def _either() -> str:
    return " or ".join(f'"{pooling}"' for pooling in POOLINGS)


def _checked(dimensions: int, settings: PoolingSettings, hidden_size: int) -> int:
    whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if whole and dimensions == hidden_size:
        return dimensions
    if settings.dimensions == ():
        allowed = (
            f"{hidden_size}, all there are: this model does not support specifying fewer, it was not trained for it"
        )
    elif settings.dimensions is None:
        allowed = f"an integer from 1 to {hidden_size}"
    else:
        allowed = (
            f"one of {', '.join(map(str, settings.dimensions))}, which the model was trained for, or {hidden_size}"
        )
    fits = whole and 1 <= dimensions <= hidden_size
    if not fits or (settings.dimensions is not None and dimensions not in settings.dimensions):
        raise InvalidParameter.of("dimensions", dimensions, allowed)
    return dimensions

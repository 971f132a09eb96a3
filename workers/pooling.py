"""Sums of hidden states, as a plan's `pooled` asks for them: what embeddings are made of. Knows rows of a step only."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trunkline.step import Float64, Plan, PooledRows


def pooled_sums(hidden: Tensor, pooled: Sequence[PooledRows]) -> Tensor:
    """float64 [K, H], on the device of `hidden` [T, H]. Each sum is made alone: it can't depend on its neighbours."""
    return torch.stack([hidden[rows.first : rows.end].sum(0, dtype=torch.float64) for rows in pooled])


def unsound(sums: Float64, plan: Plan) -> dict[int, str]:
    """Logits row -> why it fails, where a sum is not finite."""
    are_finite = [bool(np.isfinite(one).all()) for one in sums]
    return {
        rows.row: (
            f"The model's hidden states up to position {plan.rows[rows.row].position - 1} are not finite. The weights or the KV"
            " cache hold numbers that the model's dtype can't represent: try --dtype float32."
        )
        for rows, is_finite in zip(plan.pooled, are_finite, strict=True)
        if not is_finite
    }

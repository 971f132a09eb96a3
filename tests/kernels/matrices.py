"""Matrices of small integers, of every kind that files and --quantization bring, and rows as they are multiplied by them."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from trunkline.kernels.quantized import CENTRE, IntegerFormat, Offsets, QuantizedMatrix

NONE, STORED, CENTRED = Offsets
SPAN = 32  # inputs of a row that are rounded with one scale, at most


def make_matrix(
    n: int, k: int, *, group: int = 0, bits: int = 8, offsets: Offsets = NONE, half: bool = False, seed: int = 0
) -> QuantizedMatrix:
    """Random values over their whole range; `group` 0: all of K; `half`: float16 holds scales and offsets."""
    generator = torch.Generator().manual_seed(seed)
    group = group or k
    low, high = (0, 15) if bits == 4 else (-128, 127)
    value = torch.randint(low, high + 1, (n, k), generator=generator, dtype=torch.int8)
    scale = torch.rand(n, k // group, generator=generator) + 0.01
    offset = torch.randn(n, k // group, generator=generator)
    if half:
        scale, offset = scale.half().float(), offset.half().float()
    stored = {NONE: None, STORED: offset, CENTRED: -CENTRE * scale}[offsets]
    return QuantizedMatrix(value, scale, stored, group=group, bits=bits)


FORMATS: dict[str, dict[str, Any]] = {  # those that files and --quantization need: K is 576
    "per channel": {},
    "Q8_0": {"group": 32, "half": True},
    "Q6_K": {"group": 16},
    "Q5_K": {"group": 32, "offsets": STORED},
    "Q4_K": {"group": 32, "bits": 4, "offsets": STORED},
    "Q4_1": {"group": 32, "bits": 4, "offsets": STORED, "half": True},
    "Q4_0": {"group": 32, "bits": 4, "offsets": CENTRED, "half": True},
}


@st.composite
def matrices(draw: st.DrawFn) -> QuantizedMatrix:
    group = draw(st.sampled_from([0, 4, 16, 32, 128]))
    k = draw(st.integers(1, 1100)) if group == 0 else group * draw(st.integers(1, 5))
    return make_matrix(
        draw(st.integers(1, 50)),
        k,
        group=group,
        bits=draw(st.sampled_from([4, 8])),
        offsets=draw(st.sampled_from(Offsets)),
        half=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def rounded(x: Tensor, integers: IntegerFormat) -> Tensor:
    """Rows as cpu_src/quantized.c rounds them: to -127 … 127 times a scale, in spans of inputs whose weights share theirs. What is below
    2^-20 of the row's largest number, or rather of the power of two up to it, is rounded as if it were as large."""
    rows, k = x.shape
    span = min(integers.group, SPAN)
    spans = torch.nn.functional.pad(x, (0, -k % span)).view(rows, -1, span)
    unit = 2.0 ** x.abs().amax(dim=1).clamp(min=2.0**-100).log2().floor()[:, None, None]
    largest = spans.abs().amax(dim=2, keepdim=True).maximum(2.0**-20 * unit)
    inverse = (
        torch.tensor(127.0) / largest
    )  # a plain 127 would be multiplied by the reciprocal, and near ties round the other way
    return (torch.round(spans * inverse).double() * (largest.double() / 127)).view(rows, -1)[:, :k]

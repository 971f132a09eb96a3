"""Matrices of small integers, of every kind that files and --quantization bring."""

from typing import Any

import torch
from hypothesis import strategies as st

from trunkline.kernels.quantized import CENTRE, Offsets, QuantizedMatrix

NONE, STORED, CENTRED = Offsets


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

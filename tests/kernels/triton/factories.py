"""What the tests of Triton kernels share: the mended interpreter, dtypes and how far off each may be."""

import torch

from trunkline.kernels.triton import interpreter

if interpreter.is_on():
    interpreter.mend()

# Relative to the largest number of a result, by dtype: mostly its rounding.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = tuple(TOLERANCE)

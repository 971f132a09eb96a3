"""Writers of GGUF's K-quants, which the gguf package only reads: plain, not as good as llama.cpp's.

    quantize(values, "Q6_K")        # float32 [N, K] -> uint8 [N, bytes of a row]; other types are the package's

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import gguf
import numpy as np

BLOCK = 256


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """As `gguf.quants.quantize`, and Q4_K, Q5_K and Q6_K."""
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    blocks = values.reshape(-1, BLOCK)
    stored = _q6_k(blocks) if kind == "Q6_K" else _q4_or_5_k(blocks, 4 if kind == "Q4_K" else 5)
    return stored.reshape(len(values), -1)


def _q4_or_5_k(blocks: np.ndarray, bits: int) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(axis=2), 0)
    top = 2**bits - 1
    d, scales = _six_bits((groups.max(axis=2) - lowest) / top)
    dmin, minima = _six_bits(-lowest)
    scale, minimum = d * scales, dmin * minima
    q = np.rint((groups + minimum[..., None]) / np.maximum(scale, 1e-9)[..., None]).clip(0, top).astype(np.uint8)
    packed = np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    low = q & 15
    halves = (low[:, 0::2] | low[:, 1::2] << 4).reshape(-1, 128)  # a group's are the low ones, the next one's the high
    fifth = ((q >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)  # bit g: of group g
    return np.concatenate([_bytes(d), _bytes(dmin), packed, *([fifth] if bits == 5 else []), halves], axis=1)


def _six_bits(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A float16 number [B, 1] and multiples of it [B, 8], 0 … 63, near `wanted` [B, 8]."""
    unit = (wanted.max(axis=1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    return unit, np.rint(wanted / np.maximum(unit, 1e-9)).clip(0, 63).astype(np.uint8)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(axis=2) / 31
    d = (wanted.max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scales = np.rint(wanted / np.maximum(d, 1e-9)).clip(-128, 127).astype(np.int8)
    q = np.rint(groups / np.maximum(d * scales, 1e-9)[..., None]).clip(-32, 31) + 32
    halves = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # of 128 values each, in four rows
    low, high = halves & 15, halves >> 4
    ql = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    qh = (high << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    return np.concatenate([ql, qh, scales.view(np.uint8), _bytes(d)], axis=1)


def _bytes(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype("<f2").view(np.uint8)

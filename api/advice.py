"""What a server says about its own settings once it is ready: those that start well, and disappoint later. Knows no request.

More of it, and what else is easily got wrong: docs/pitfalls.md.
"""

import logging
from typing import NamedTuple

from trunkline.config import EngineConfig
from trunkline.messages import Ready

FEW_REQUESTS = 2.0  # of full length: with less room than for these, two of them can't run beside each other


class Advice(NamedTuple):
    """A sentence or two, and how loud: logging.INFO or logging.WARNING."""

    level: int
    sentence: str


def advise(config: EngineConfig, ready: Ready, quantization: str | None) -> list[Advice]:
    """All there is to say; mostly little.

    quantization  how most weights of the checkpoint are stored, such as "Q4_1"; None: as plain numbers
    """
    found: list[Advice] = []
    if sentence := _about_room(ready):
        found.append(Advice(logging.WARNING, sentence))
    if not config.cache.enable_prefix_caching:
        found.append(
            Advice(
                logging.WARNING,
                "Prefix caching is off (--no-enable-prefix-caching): every request computes all of its prompt, whatever others"
                " have sent before.",
            )
        )
    if config.cache.kv_cache_dtype.startswith("fp8"):
        found.append(
            Advice(
                logging.INFO,
                f"Keys and values are stored as {config.cache.kv_cache_dtype}, less exactly than they are computed. Compare"
                " answers with and without it, on questions of your own.",
            )
        )
    if config.model.quantization == "int8":
        quantization = "int8" if quantization is None else f"{quantization}, then int8"
    if quantization is not None:
        found.append(
            Advice(
                logging.INFO,
                f"The weights are quantized ({quantization}): answers may be worse than the original model's. Compare"
                " them, on questions of your own, before others rely on them.",
            )
        )
    return found


def _about_room(ready: Ready) -> str | None:
    room = ready.num_pages * ready.page_size / ready.max_model_len
    if room >= FEW_REQUESTS:
        return None
    return (
        f"The KV cache has room for {room:.1f} requests of --max-model-len, {ready.max_model_len:,} tokens: of two that long"
        " one waits, and little stays cached. If yours are shorter, say so by a lower --max-model-len; else raise"
        " --kv-cache-memory."
    )

"""What a server says about its settings once it is ready."""

import logging
from pathlib import Path

import pytest

from tests.api.serving import Server
from tests.stub import make_ready
from trunkline.api.advice import Advice, advise
from trunkline.config import engine_config


def told(num_tokens: int = 65_536, stored: str | None = None, **settings: object) -> list[Advice]:
    ready = make_ready(num_pages=num_tokens // 16)
    return advise(engine_config("model", **settings), ready, stored)  # type: ignore[arg-type]


def test_ordinary_settings_need_no_advice() -> None:
    assert told() == told(num_tokens=16_384) == []


@pytest.mark.parametrize(
    ("num_tokens", "words"),
    [(16_368, "room for 2.0 requests"), (8208, "room for 1.0 requests")],
)
def test_little_room(num_tokens: int, words: str) -> None:
    ((level, sentence),) = told(num_tokens)
    assert level == logging.WARNING
    assert words in sentence and "8,192" in sentence and "--max-model-len" in sentence


def test_no_cache() -> None:
    ((level, sentence),) = told(enable_prefix_caching=False)
    assert level == logging.WARNING and sentence.startswith("Prefix caching is off (--no-enable-prefix-caching)")


def test_less_exact_numbers() -> None:
    stored, weights = told(stored="Q4_1", kv_cache_dtype="fp8")
    assert (stored.level, weights.level) == (logging.INFO, logging.INFO)
    assert "fp8" in stored.sentence and "(Q4_1)" in weights.sentence


@pytest.mark.parametrize(("stored", "words"), [("Q4_1", "(Q4_1, then int8)"), (None, "(int8)")])
def test_weights_that_are_quantized_here(stored: str | None, words: str) -> None:
    ((_, sentence),) = told(stored=stored, quantization="int8")
    assert words in sentence


@pytest.mark.slow
def test_the_log_has_it(tiny: Path) -> None:
    with Server(tiny, "--no-enable-prefix-caching", "--kv-cache-memory", "3MiB") as server:
        server.wait_ready()
        server.wait_for(r"WARNING .* The KV cache has room for 1\.\d requests of --max-model-len, 8,192 tokens")
        server.wait_for(r"WARNING .* Prefix caching is off")

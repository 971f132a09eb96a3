"""The flags of `trunkline serve` about structured output. Knows flags, no grammar."""

import argparse
from collections.abc import Callable
from typing import Any

from trunkline.config import (
    GRAMMAR_BACKEND_ALIASES,
    GRAMMAR_BACKENDS,
    UNSUPPORTED_POLICIES,
    ApiConfig,
    GrammarConfig,
)
from trunkline.units import format_bytes

_API, _ENGINE = ApiConfig(served_model_names=("",)), GrammarConfig()


def add_grammar_flags(group: argparse._ArgumentGroup, size: Callable[[str], int]) -> None:
    """Add them all. `size` reads sizes in bytes."""
    group.add_argument(
        "--grammar-backend",
        "--guided-decoding-backend",
        "--structured-outputs-config.backend",
        dest="grammar_backend",
        type=_backend,
        choices=GRAMMAR_BACKENDS,
        default=_API.grammar_backend,
        help="who enforces grammars of requests that name nobody. auto: the first that is sure to be true to it; any other: what"
        " it is not sure of is refused",
    )
    group.add_argument(
        "--grammar-unsupported",
        choices=UNSUPPORTED_POLICIES,
        default=_API.grammar_unsupported,
        help="what becomes of a schema with something that cannot be enforced. error: it is refused; validate: the rest is"
        " enforced, the finished text is checked, and the answer says whether it is valid",
    )
    group.add_argument(
        "--close-on-length",
        action=argparse.BooleanOptionalAction,
        default=_API.close_on_length,
        help="bring structured texts to a legal end before their tokens are used up; a request can say so itself",
    )
    group.add_argument(
        "--grammar-compile-seconds",
        type=float,
        metavar="SECONDS",
        default=_ENGINE.compile_seconds,
        help="for one grammar; what takes longer is refused",
    )
    group.add_argument(
        "--grammar-compile-threads",
        type=int,
        metavar="N",
        default=_ENGINE.compile_threads,
        help="grammars compiled at a time",
    )
    group.add_argument(
        "--grammar-cache-size",
        type=size,
        metavar="SIZE",
        help=f"of compiled grammars that are kept (default: {format_bytes(_ENGINE.cache_bytes).replace('.0 ', '')})",
    )
    group.add_argument(
        "--grammar-forced-tokens",
        action=argparse.BooleanOptionalAction,
        default=_ENGINE.forced_tokens,
        help="compute tokens that a grammar leaves no choice about together: the same text in fewer steps",
    )


def grammar_engine_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Those for engine_config."""
    flags = {
        "grammar_compile_seconds": args.grammar_compile_seconds,
        "grammar_compile_threads": args.grammar_compile_threads,
        "grammar_forced_tokens": args.grammar_forced_tokens,
    }
    return flags if args.grammar_cache_size is None else {**flags, "grammar_cache_size": args.grammar_cache_size}


def grammar_api_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Those for ApiConfig."""
    return {
        "grammar_backend": args.grammar_backend,
        "grammar_unsupported": args.grammar_unsupported,
        "close_on_length": args.close_on_length,
    }


def _backend(name: str) -> str:
    return GRAMMAR_BACKEND_ALIASES.get(name, name)

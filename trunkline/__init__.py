"""Trunkline: a prefix-tree cache-centric server for language models.

from trunkline import LLM, SamplingParams
print(LLM().generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].text)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Constraint", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from trunkline.async_llm import AsyncLLM
    from trunkline.constraint import Constraint
    from trunkline.llm import LLM
    from trunkline.sampling import SamplingParams

_HOMES = {
    "LLM": "trunkline.llm",
    "AsyncLLM": "trunkline.async_llm",
    "Constraint": "trunkline.constraint",
    "SamplingParams": "trunkline.sampling",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for: `import trunkline` alone stays instant."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trunkline' has no attribute {name!r}")

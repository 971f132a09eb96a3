"""Checked look-ups in the settings that come with a checkpoint: config.json, or a GGUF file's metadata.

fields = Fields("config.json", json_object)
fields.integer("num_hidden_layers", 1, 1024)      # or a ModelError that names the key, the value seen and those allowed
"""

from collections.abc import Mapping
from typing import Any

from trunkline.errors import ModelError, shown

MAX_TOKENS = 2**27  # of context: more than any model claims, and positions stay exact in int32
MAX_WIDTH = 2**17  # numbers of a hidden state
MAX_VOCAB = 2**24  # token ids; the largest vocabularies have 2**18


class Fields:
    """The settings of one file. A null is the same as a missing key, as it is to transformers; but where `defaults` has a value, a null
    is not."""

    def __init__(self, where: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.where = where
        self._values = {**(defaults or {}), **values}

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def refuse(self, key: str, allowed: str) -> ModelError:
        return ModelError(f"{self.where}: '{key}' is {shown(self.get(key))}; allowed is {allowed}.")

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        seen = self._present(key, default)
        if isinstance(seen, bool) or not isinstance(seen, int) or not low <= seen <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return seen

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """Greater than `low`, at most `high`; `default` None: the key must be there."""
        seen = self._present(key, default)
        if isinstance(seen, bool) or not isinstance(seen, int | float) or not low < seen <= high:
            raise self.refuse(key, f"a number greater than {low:g} and at most {high:g}")
        return float(seen)

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        """A list of them, each as `number` has it; () if there is none."""
        seen = self.get(key)
        if seen is None:
            return ()
        is_list = isinstance(seen, list)
        if not is_list or not all(isinstance(x, int | float) and low < x <= high for x in seen):
            raise self.refuse(key, f"a list of numbers greater than {low:g} and at most {high:g}")
        return tuple(map(float, seen))

    def boolean(self, key: str, *, default: bool) -> bool:
        seen = self._present(key, default)
        if not isinstance(seen, bool):
            raise self.refuse(key, "true or false")
        return seen

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; () if there is none."""
        seen = self.get(key)
        if seen is None:
            return ()
        token_ids = seen if isinstance(seen, list) else [seen]
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < MAX_VOCAB:
                raise self.refuse(key, "a token id or a list of token ids")
        return tuple(token_ids)

    def section(self, key: str) -> "Fields":
        """The object under `key`, empty if there is none."""
        seen = self.get(key)
        if seen is not None and not isinstance(seen, Mapping):
            raise self.refuse(key, "an object")
        return Fields(f"{self.where}: {key}", seen or {})

    def _present(self, key: str, default: Any) -> Any:
        seen = self.get(key)
        if seen is None and default is None:
            raise ModelError(f"{self.where}: '{key}' is missing.")
        return default if seen is None else seen

"""The families of reasoning models, by name. To add one: write its class (see reasoning.py), and list it here."""

from trunkline.api.harmony_reasoning import HarmonyReasoningParser
from trunkline.api.reasoning import (
    DeepSeekR1Parser,
    DeepSeekV3Parser,
    Gemma4Parser,
    Glm45Parser,
    GraniteParser,
    KimiK2Parser,
    MistralParser,
    Qwen3Parser,
    ReasoningParser,
)
from trunkline.errors import ConfigError

REASONING_PARSERS: tuple[type[ReasoningParser], ...] = (
    DeepSeekR1Parser,
    DeepSeekV3Parser,
    Qwen3Parser,
    Glm45Parser,
    KimiK2Parser,
    MistralParser,
    GraniteParser,
    Gemma4Parser,
    HarmonyReasoningParser,
)


def find_reasoning_parser(name: str) -> type[ReasoningParser] | None:
    """The class of that name, ours or another server's; None for "none". Raises ConfigError if there is none."""
    if name == "none":
        return None
    for parser in REASONING_PARSERS:
        if name == parser.name or name in parser.aliases:
            return parser
    known = ", ".join(parser.name for parser in REASONING_PARSERS)
    raise ConfigError(f"--reasoning-parser is {name!r}; allowed is one of none, {known}.")

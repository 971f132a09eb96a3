"""Dialects of tool calls: one class, in one file, for each. To add one: write its class (see base.py), and list it here."""

from typing import NamedTuple

from trunkline.api.tool_parsers.base import ToolParser
from trunkline.api.tool_parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from trunkline.api.tool_parsers.deepseek_v32 import DeepSeekV32Parser
from trunkline.api.tool_parsers.gemma import FunctionGemmaParser, Gemma4Parser
from trunkline.api.tool_parsers.glm import GlmParser
from trunkline.api.tool_parsers.harmony import HarmonyParser
from trunkline.api.tool_parsers.hermes import HermesParser
from trunkline.api.tool_parsers.json_calls import GenericParser
from trunkline.api.tool_parsers.kimi_k2 import KimiK2Parser
from trunkline.api.tool_parsers.llama3_json import Llama3JsonParser
from trunkline.api.tool_parsers.mistral import Mistral11Parser, MistralParser
from trunkline.api.tool_parsers.pythonic import PythonicParser
from trunkline.api.tool_parsers.qwen3_coder import Qwen3CoderParser
from trunkline.api.tool_parsers.smollm import SmolLMParser
from trunkline.api.tool_parsers.smollm3_python import SmolLM3PythonParser
from trunkline.errors import ConfigError

# In the order in which a template is looked at: the first whose hint it has. What others have too comes last.
DIALECTS: tuple[type[ToolParser], ...] = (
    Qwen3CoderParser,
    GlmParser,
    DeepSeekV32Parser,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    KimiK2Parser,
    HarmonyParser,
    Mistral11Parser,
    MistralParser,
    FunctionGemmaParser,
    Gemma4Parser,
    PythonicParser,
    Llama3JsonParser,
    HermesParser,
    SmolLMParser,
    SmolLM3PythonParser,
    GenericParser,
)


class Choice(NamedTuple):
    """A dialect, and why it was taken: half a sentence."""

    dialect: type[ToolParser]
    reason: str


def dialect_names() -> tuple[str, ...]:
    """What --tool-call-parser may be, beside "auto"."""
    return tuple(dialect.name for dialect in DIALECTS)


def find_dialect(name: str) -> type[ToolParser]:
    """The class of that name, ours or another server's. Raises ConfigError if there is none."""
    for dialect in DIALECTS:
        if name == dialect.name or name in dialect.aliases:
            return dialect
    raise ConfigError(f"--tool-call-parser is {name!r}; allowed is one of auto, {', '.join(dialect_names())}.")


def choose_dialect(wanted: str, template: str | None, *, has_tools_branch: bool) -> Choice:
    """The dialect that a model is read in.

    wanted            a name, or "auto": what the chat template teaches
    template          its source
    has_tools_branch  False: the template doesn't show tools, and our own prompt teaches SmolLM2's dialect

    Raises ConfigError for a name that there is not.
    """
    if wanted != "auto":
        return Choice(find_dialect(wanted).fitting(template or ""), "--tool-call-parser says so")
    if not has_tools_branch:
        return Choice(SmolLMParser, "it is what the built-in tools prompt asks for")
    for dialect in DIALECTS:
        for hint in dialect.hints:
            if all(part in (template or "") for part in hint.split(" … ")):
                return Choice(dialect, f"the chat template has {hint!r}")
    return Choice(HermesParser, "the chat template names no format that is known; name one with --tool-call-parser")

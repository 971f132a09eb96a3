"""SmolLM2's dialect, which is also what our own tool prompt asks for (tool_prompt.py): all calls as one list.

<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>
"""

from trunkline.api.tool_parsers.base import CallForm
from trunkline.api.tool_parsers.hermes import HermesParser


class SmolLMParser(HermesParser):
    """Reads what Hermes' does, blocks with one call or a list of them; small models confuse the two."""

    name = "smollm"
    aliases = ()
    hints = ()
    form = CallForm(
        opening="<tool_call>[",
        begin='{"name": "{name}", "arguments": ',
        end="}",
        separator=", ",
        closing="]</tool_call>",
        trigger="<tool_call>",
    )

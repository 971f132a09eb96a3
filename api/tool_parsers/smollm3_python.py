"""SmolLM3's other dialect, which it writes if its template was given `python_tools`: lines of Python.

<code>
f(a=1)
</code>
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from trunkline.api.tool_parsers.pythonic import PythonicParser


class SmolLM3PythonParser(PythonicParser):
    """Its template also teaches Hermes' dialect, which therefore is what `auto` takes."""

    name = "smollm3_python"
    aliases = ()
    hints = ()
    blocks: ClassVar[Mapping[str, str]] = MappingProxyType({"<code>": "</code>"})
    is_bare = False
    markers: ClassVar[tuple[str, ...]] = ("<code>", "</code>")

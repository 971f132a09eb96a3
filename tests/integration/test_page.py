"""docs/clients.md shows the first lines of the very files that are run, and the files stay short enough to be read."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.integration.environment import CONSTRAINTS, ROOT
from tests.integration.test_clients import CLIENTS, NEWEST, OPENAI2

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
BLOCKS = [block.strip() for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)]
FILES = sorted({*NEWEST, *OPENAI2})
END = "# That was an example; from here on, everything is checked.\n"


def example(file: str) -> str:
    """A file without its docstring, up to where its checks begin."""
    source = (CLIENTS / file).read_text(encoding="utf-8")
    return source.split('"""\n', 1)[1].split(END)[0].strip()


@pytest.mark.parametrize("file", FILES)
def test_the_page_shows_what_is_run(file: str) -> None:
    assert END in (CLIENTS / file).read_text(encoding="utf-8")
    assert example(file) in BLOCKS, f"copy the example of {file} into docs/clients.md"


def test_the_page_shows_nothing_else() -> None:
    assert {example(file) for file in FILES} == set(BLOCKS)


def test_every_client_is_run_and_short() -> None:
    lengths = {path.name: path.read_text(encoding="utf-8").count("\n") for path in CLIENTS.glob("*_client.py")}
    assert sorted(lengths) == FILES
    assert max(lengths.values()) < 80, lengths


@pytest.mark.parametrize(
    ("extra", "pins"), [("integration", ROOT / "constraints.txt"), ("integration-openai2", CONSTRAINTS)]
)
def test_every_client_is_pinned(extra: str, pins: Path) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    names = {re.split(r"[^\w.-]", one)[0].lower() for one in wanted}
    pinned = {line.split("==")[0].lower() for line in pins.read_text(encoding="utf-8").splitlines()}
    assert names <= pinned

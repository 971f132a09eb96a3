"""Every block of README and docs/ is run, or says why not; every flag and target that a page names is there."""

import ast
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import serve
from tests.documentation import (
    DATA,
    MORE_PAGES,
    PAGES,
    ROOT,
    RUNNABLE,
    SHELL,
    Block,
    blocks,
    commands,
    prose,
    serves,
    trunkline_arguments,
)
from tests.reader import Reader, addressed, is_for_a_server, json_values, other_shape
from trunkline.cli import make_parser, serve_config

BLOCKS = [block for page in [*PAGES, *MORE_PAGES] for block in blocks(page)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
INSTALLS = re.compile(r"\b(pip install|git clone|docker|kubectl|apt|npm|curl -O|wget)\b")
A_COMMAND = re.compile(
    r"^(\$ |curl |benchmarks/|make |trunkline |docker |pip |git |python |\.venv/bin/|export )", re.MULTILINE
)


def by_name(block: Block) -> str:
    return block.name


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", BLOCKS, ids=by_name)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.language in ("", "text", *RUNNABLE, *DATA), "name a language that tests/documentation.py knows"
    if block.language in ("", "text"):
        assert A_COMMAND.search(block.text) is None, "it shows a command: call it `sh`, so that it is run"
    if block.language in SHELL and not block.not_run and block.page in PAGES:
        assert INSTALLS.search(block.text) is None, "it installs something: say `<!-- not run: … -->` above it"
        started = [serves(command) for command in commands(block.text)]
        assert all(started) or not any(started), "it starts a server and does more: split it, or say why it isn't run"


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_command_hides_in_an_indented_block(page: Path) -> None:
    indented = re.findall(r"(?:^|\n)\n {4}(.*)", prose(page))
    assert not [line for line in indented if A_COMMAND.search(line)], "put it between fences"


@pytest.mark.parametrize("block", of("python"), ids=by_name)
def test_python_parses(block: Block) -> None:
    ast.parse(block.text, block.name)


@pytest.mark.parametrize("block", of("python"), ids=by_name)
def test_python_that_needs_more_than_the_test_tools_says_so(block: Block) -> None:
    extras = PROJECT["optional-dependencies"]
    more = {requirement for name in extras if name.startswith("integration") for requirement in extras[name]}
    modules = {name.removesuffix("_slim") for name in map(module, more)}
    modules -= set(map(module, (*PROJECT["dependencies"], *extras["dev"])))
    imports = set(re.findall(r"^(?:import|from) (\w+)", block.text, flags=re.MULTILINE))
    assert modules >= {"anthropic", "litellm"}
    assert not imports & modules or block.not_run or block.needs_package in modules, (
        "say `<!-- run if installed: … -->`"
    )


def module(requirement: str) -> str:
    """What a requirement's package is imported as, mostly."""
    return re.split(r"[\[<>=;~! ]", requirement)[0].replace("-", "_")


@pytest.mark.parametrize("block", of("json", "jsonl", "yaml"), ids=by_name)
def test_data_parses(block: Block) -> None:
    if block.language == "yaml":
        yaml = pytest.importorskip("yaml")
        list(yaml.safe_load_all(block.text))
    else:
        for text in [block.text] if block.language == "json" else block.text.splitlines():
            json.loads(text)


@pytest.mark.parametrize("block", of(*SHELL), ids=by_name)
def test_flags_and_targets_exist(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Run or not: the real parser reads them."""
    for command in commands(block.text):
        if command[0] == "make":
            assert TARGETS.issuperset(word for word in command[1:] if re.fullmatch(r"[a-z-]+", word)), command
        if (arguments := trunkline_arguments(command)) is not None:
            if "--config" in arguments:  # a file that only the reader has
                del arguments[arguments.index("--config") : arguments.index("--config") + 2]
            try:
                args = make_parser().parse(arguments)
                if arguments[:1] == ["serve"]:
                    serve_config(args)
            except SystemExit as ended:
                assert ended.code == 0, f"{' '.join(command)}: {capsys.readouterr().err}"


def test_a_planted_mistake_is_found() -> None:
    page = ROOT / "docs" / "planted.md"
    text = "# A\n<!-- not run: why -->\n\n```sh\npip install x\n```\n```sh\nmake serve ARGS='--prot 1' # c\n```\nx\n```json\n{}\n```\n"
    marked, server, answer = blocks(page, text)
    assert (marked.not_run, server.not_run, answer.heading) == ("why", None, 1)
    assert (server.line, answer.language) == (7, "json")
    assert is_for_a_server(server) and not is_for_a_server(marked)
    assert commands(server.text) == [["make", "serve", "ARGS=--prot 1"]]
    with pytest.raises(SystemExit):
        make_parser().parse(trunkline_arguments(commands(server.text)[0]))
    with pytest.raises(ValueError, match="nothing closes"):
        blocks(page, "```sh\nls\n")


def test_commands_of_a_shell_text() -> None:
    text = "A=1 trunkline chat -q 'two\nlines' | tee x > y && curl a # b\ncat > f <<'E'\ntrunkline no\nE\nmake \\\n  lint; B=2\n"
    assert commands(text) == [
        ["trunkline", "chat", "-q", "two\nlines"],
        ["tee", "x"],
        ["curl", "a"],
        ["cat"],
        ["make", "lint"],
    ]


def test_commands_ask_the_server_that_runs() -> None:
    text = "trunkline chat -q x\ntrunkline cache queue\ntrunkline run-batch -i a --model m\ncurl http://localhost:8000/v1\ntrunkline chat --url u"
    assert addressed(text, "http://127.0.0.1:9").splitlines() == [
        "trunkline chat --url http://127.0.0.1:9 -q x",
        "trunkline cache queue --url http://127.0.0.1:9",
        "trunkline run-batch -i a --model m",
        "curl http://127.0.0.1:9/v1",
        "trunkline chat --url u",
    ]


def test_a_reader_notices_what_does_not_work(tmp_path: Path) -> None:
    text = (
        "```python\nname = 'Ada'\n```\n```python\nprint(name)\n```\n"
        '# A\n```sh\necho \'{"a": 1}\' | tee file\n```\n```json\n{"a": 2}\n```\n```json\n[]\n```\n'
        '```sh\ncat file\n```\n```json\n{"b": 2}\n```\n```sh\nfalse | cat\n```\n```python\nnome\n```\n'
        "<!-- not run: it fails -->\n```sh\nfalse\n```\n"
    )
    *fine, other_answer, failing, raising, marked = blocks(ROOT / "docs" / "planted.md", text)
    with Reader(ROOT / "docs" / "planted.md", "http://127.0.0.1:9", tmp_path) as reader:
        said = []
        for block in fine:
            reader.do(block)
            said.append(reader.said)
        assert said == ["", "Ada\n", '{"a": 1}\n', None, None, '{"a": 1}\n']
        with pytest.raises(AssertionError, match=r"planted.md:\d+ shows another answer .* has no \['b'\]"):
            reader.do(other_answer)
        with pytest.raises(AssertionError, match=r"planted.md:\d+ ended with 1"):
            reader.do(failing)
        with pytest.raises(AssertionError, match=r"planted.md:\d+ raised:\n(.|\n)*NameError"):
            reader.do(raising)
        reader.do(marked)
    assert not (ROOT / "file").exists(), "what is written lands in the reader's folder"


def test_shapes() -> None:
    shown = {"a": 1, "b": [{"c": "x"}], "d": None}
    assert other_shape(shown, {"a": 2.5, "b": [{"c": "y"}, {}], "d": None}) == ""
    assert other_shape(shown, {"a": True, "b": [{"c": "y"}], "d": None}) == "the answer.a is True, where 1 is shown"
    assert other_shape(shown, {"a": 1, "b": [], "d": None}) == "the answer.b is []"
    assert other_shape(shown, {"a": 1, "b": [{"c": "y"}]}) == "the answer has no ['d']"
    assert other_shape({"a": 1}, {"a": 1, "e": 1}) == "the answer also has ['e']"
    assert other_shape({"a": 1, "…": "…"}, {"a": 1, "e": 1}) == ""
    assert json_values('{"a": 1}\nwords {"b": [2]}\n7') == [{"a": 1}, {"b": [2]}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if shutil.which("curl") is None:
        pytest.skip("the pages' commands need curl")
    with serve() as address:
        yield address


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_does_what_it_says(page: Path, url: str, tmp_path: Path) -> None:
    with Reader(page, url, tmp_path) as reader:
        for block in blocks(page):
            reader.do(block)

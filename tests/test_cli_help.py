"""What every command says of itself: a purpose, examples that work, and nothing slow to import."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trunkline.cli import make_parser
from trunkline.cli_parser import NAMES_HERE, NOT_HERE

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    "torch",
    "numpy",
    "fastapi",
    "pydantic",
    "zmq",
    "tokenizers",
    "aiohttp",
    "jinja2",
    "yaml",
    "argcomplete",
    "tqdm",
)


def commands(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """Every parser of the command line, the outermost first."""
    parser = parser or make_parser()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from commands(inner)


def is_leaf(parser: argparse.ArgumentParser) -> bool:
    return not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


LEAVES = {parser.prog: parser for parser in commands() if is_leaf(parser)}


def examples(parser: argparse.ArgumentParser) -> list[str]:
    """The command lines in its help."""
    return re.findall(r"^  (trunkline .+)$", parser.epilog or "", flags=re.MULTILINE)


def test_all_commands_are_there() -> None:
    assert {prog.removeprefix("trunkline ") for prog in LEAVES} >= {
        *("serve", "chat", "complete", "run-batch", "simulate", "env", "completion", "grammar check"),
        *(f"bench {kind}" for kind in ("serve", "cache", "grammar", "step", "quality", "offline")),
        *(f"cache {what}" for what in ("tree", "explain", "queue")),
    }


@pytest.mark.parametrize("prog", LEAVES)
def test_a_command_has_a_purpose_and_examples_that_it_understands(
    prog: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("server.yaml").touch()  # which an example names
    parser = LEAVES[prog]
    assert parser.description and re.match(r"[A-Z].{10,100}\.( |$)", parser.description), parser.description
    found = examples(parser)
    assert found, f"{prog} has no example"
    for example in found:
        words = shlex.split(example, comments=True)
        line = words[1 : next((at for at, word in enumerate(words) if word in (">", ">>", "|")), len(words))]
        args = make_parser().parse(line)
        assert args.parser.prog == prog


@pytest.mark.parametrize("prog", LEAVES)
def test_every_flag_is_described(prog: str) -> None:
    told = {action.dest: action.help for action in LEAVES[prog]._actions}
    assert all(told.values()), [dest for dest, text in told.items() if not text]


@pytest.mark.parametrize("prog", LEAVES)
def test_defaults_are_told_once(prog: str) -> None:
    text = " ".join(LEAVES[prog].format_help().split())
    assert "(default: None)" not in text and "%(" not in text
    assert not re.search(r"\(default[^)]*\) \(default", text)


@pytest.mark.parametrize("prog", LEAVES)
def test_a_misspelt_flag_gets_the_nearest(prog: str) -> None:
    parser = LEAVES[prog]
    long = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    flag = max(long, key=len)
    near = flag[:-2] + flag[-1] + flag[-2]
    assert f"did you mean {flag}?" in parser.describe_unknown([near])  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["bench", "serve", "--help"], ["--version"]])
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom trunkline.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        f"sys.exit(f'imported: {{heavy}}' if (heavy := set({HEAVY!r}) & sys.modules.keys()) else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


# ---------------------------------------------------------------- docs/cli.md

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w.-]*")


def section(prog: str) -> str:
    """What the page says of a command: its section, or that of the group it belongs to."""
    while prog:
        found = re.search(rf"^(##+) {prog}\n(.*?)(?=^## |^### trunkline |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
        if found is not None:
            return found[2]
        prog = prog.rpartition(" ")[0]
    raise AssertionError("there is no such section")


def flags_in(text: str) -> set[str]:
    """The flags that a text names between backticks, and those in its commands."""
    inside = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, flags=re.DOTALL)
    return {flag for piece in (*inside, *blocks) for flag in FLAG.findall(piece)}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


@pytest.mark.parametrize("prog", LEAVES)
def test_the_page_names_every_flag(prog: str) -> None:
    text = section(prog)
    if "has its flags" in text:
        text += (ROOT / "docs" / f"{prog.split()[-1].replace('simulate', 'simulator')}.md").read_text(encoding="utf-8")
    actions = [action for action in LEAVES[prog]._actions if not isinstance(action, argparse._HelpAction)]
    named = flags_in(text)
    missing = [
        action.option_strings for action in actions if action.option_strings and not named & set(action.option_strings)
    ]
    assert not missing, f"docs/cli.md does not name {missing} of {prog}"


@pytest.mark.parametrize("heading", re.findall(r"^##+ (trunkline .+)$", PAGE, flags=re.MULTILINE))
def test_the_page_names_no_flag_that_is_not_there(heading: str) -> None:
    known = {"--help"}
    for prog, parser in LEAVES.items():
        if prog.startswith(heading) or heading == prog:
            known |= flags_of(parser)
    text, _, elsewhere = section(heading).partition("### Coming from")
    takes_serve = "(#trunkline-serve)" in text
    known |= flags_of(LEAVES["trunkline serve"]) if takes_serve else set()
    assert len(known) > 1 or heading == "trunkline completion", f"there is no command {heading}"
    assert not (strange := flags_in(text) - known), f"docs/cli.md names {strange} of {heading}"
    theirs = flags_in(elsewhere) - flags_of(LEAVES["trunkline serve"]) - {"-v"}
    assert theirs <= NAMES_HERE.keys() | NOT_HERE.keys(), theirs - NAMES_HERE.keys() - NOT_HERE.keys()

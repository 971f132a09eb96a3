"""What our pages show: fenced blocks, and the commands in them. Knows Markdown and a little shell; runs nothing.

A line of HTML right above a block says what a reader can't see, or why nobody runs it:

    <!-- not run: needs a GPU -->             its flags are checked all the same
    <!-- run if installed: anthropic -->      by a test only where that package is
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MORE_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", ROOT / "loadtests" / "README.md"]

SHELL = ("sh", "bash")
RUNNABLE = (*SHELL, "python")
DATA = ("json", "jsonl", "yaml", "toml", "ini", "dockerfile", "promql")  # shown, not run; those we can read are parsed
FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)[^\n`]*")
MARK = re.compile(r"<!-- (?P<kind>not run|run if installed): (?P<what>.+) -->")
OPERATORS = {";", "&", "&&", "|", "||", "(", ")", ">", ">>", "<", "<<", "<<<", ">&", "&>"}
BEGINS_A_COMMAND = OPERATORS - {">", ">>", "<", "<<", "<<<", ">&", "&>"}


class Block(NamedTuple):
    """One fenced block.

    heading         the number of headings above it on its page: blocks with the same are one section
    language        what stands behind the fence; "": something to look at, such as an output
    not_run         why no test runs it; None: it is run
    needs_package   run only where this package is installed
    """

    page: Path
    line: int
    heading: int
    language: str
    text: str
    not_run: str | None
    needs_package: str | None

    @property
    def name(self) -> str:
        """Where it stands: docs/api.md:217."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """All blocks of a page, in order. Raises ValueError for a fence that nothing closes."""
    found: list[Block] = []
    headings, mark = 0, None
    lines = iter(enumerate((page.read_text(encoding="utf-8") if text is None else text).splitlines(), start=1))
    for number, line in lines:
        if fence := FENCE.fullmatch(line):
            inside = _until_fence(lines, fence["indent"])
            if inside is None:
                raise ValueError(f"{page}:{number}: nothing closes this block")
            kind, what = (mark["kind"], mark["what"]) if mark else ("", None)
            found.append(
                Block(
                    page,
                    number,
                    headings,
                    fence["language"],
                    inside,
                    what if kind == "not run" else None,
                    what if kind == "run if installed" else None,
                )
            )
        headings += bool(re.match("#+ ", line))
        mark = MARK.fullmatch(line.strip()) or (None if line.strip() else mark)
    return found


def _until_fence(lines: Iterator[tuple[int, str]], indent: str) -> str | None:
    inside: list[str] = []
    for _, line in lines:
        if line.rstrip() == f"{indent}```":
            return "\n".join(inside) + "\n"
        inside.append(line.removeprefix(indent))
    return None


def prose(page: Path) -> str:
    """A page without its fenced blocks: line numbers stay."""
    lines, kept, inside = page.read_text(encoding="utf-8").splitlines(), [], False
    for line in lines:
        is_fence = FENCE.fullmatch(line) is not None
        kept.append("" if inside or is_fence else line)
        inside ^= is_fence
    return "\n".join(kept)


def commands(shell: str) -> list[list[str]]:
    """The simple commands of a shell text, each as its words, without redirections and leading assignments."""
    found: list[list[str]] = []
    for words in _statements(shell):
        command: list[str] = []
        skip = False
        for word in [*words, ";"]:
            if skip:
                skip = False
            elif word in BEGINS_A_COMMAND:
                found.extend([command] if command else [])
                command = []
            elif word in OPERATORS:
                skip = True
            elif command or not re.fullmatch(r"\w+=.*", word, flags=re.DOTALL):
                command.append(word)
    return found


def _statements(shell: str) -> Iterator[list[str]]:
    """The words of each line; lines are joined where a quote or a backslash says so, here-documents left out."""
    lines = iter(shell.replace("\\\n", " ").splitlines())
    for line in lines:
        text = line
        while (words := _words(text)) is None:
            text += "\n" + next(lines)  # StopIteration: a quote that nothing closes, a RuntimeError here
        yield words
        for mark in re.findall(r"(?<!<)<<-?\s*['\"]?(\w+)['\"]?", text):
            for inside in lines:
                if inside.strip() == mark:
                    break


def _words(text: str) -> list[str] | None:
    """None if a quote is still open."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def trunkline_arguments(command: list[str]) -> list[str] | None:
    """What follows `trunkline` in `trunkline …`, `python -m trunkline …` and `make serve ARGS='…'`; None for anything else."""
    program = command[0].rsplit("/", 1)[-1]
    if program == "trunkline":
        return command[1:]
    if program.startswith("python") and command[1:3] == ["-m", "trunkline"]:
        return command[3:]
    if program == "make" and "serve" in command:
        flags = [word.removeprefix("ARGS=") for word in command if word.startswith("ARGS=")]
        return ["serve", *shlex.split(" ".join(flags))]
    return None


def serves(command: list[str]) -> bool:
    """Whether it starts a server, and so does not end by itself."""
    arguments = trunkline_arguments(command) or [""]
    return arguments[0] == "serve" and "--show-config" not in arguments

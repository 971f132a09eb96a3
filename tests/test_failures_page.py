"""docs/failures.md is true as far as a program can tell: no number is missing, and every test it names is there. Nothing is imported."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "failures.md"
NUM_FAILURES = 89
CANNOT_OCCUR = "Cannot occur"


def rows(page: str) -> dict[int, str]:
    """The last cell of each row: what keeps that failure from happening."""
    found: dict[int, str] = {}
    for line in page.splitlines():
        if match := re.fullmatch(r"\| (\d+) \|.+\|.+\|(.+)\|", line):
            number = int(match[1])
            assert number not in found, f"{number} has two rows"
            found[number] = match[2].strip()
    return found


def named_tests(text: str) -> list[tuple[str, str]]:
    """File below tests/, and function."""
    return re.findall(r"`([\w/]+\.py)::(\w+)`", text)


@cache
def functions(file: str) -> set[str]:
    """The tests of a file, read without running it; none if there is no such file."""
    path = TESTS / file
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


ROWS = rows(PAGE.read_text(encoding="utf-8"))


def test_every_failure_has_a_row() -> None:
    assert list(ROWS) == list(range(1, NUM_FAILURES + 1))


@pytest.mark.parametrize("number", ROWS)
def test_a_row_names_tests_that_exist_or_says_why_it_cannot_occur(number: int) -> None:
    named = named_tests(ROWS[number])
    missing = [f"{file}::{test}" for file, test in named if test not in functions(file)]
    assert not missing, "the page names tests that are gone: name what replaces them, or write them anew"
    assert named or CANNOT_OCCUR in ROWS[number], "neither a test nor a reason"
    assert ROWS[number].count("::") == len(named), "a test is written as `folder/test_file.py::test_name`"


@pytest.mark.parametrize("folder", ["radix", "scheduler"])
def test_what_was_written_for_the_page_is_on_it(folder: str) -> None:
    file = f"{folder}/test_incidents.py"
    written = {name for name in functions(file) if name.startswith("test_")}
    named = {test for row in ROWS.values() for path, test in named_tests(row) if path == file}
    assert written == named


def test_a_planted_mistake_is_found() -> None:
    page = "| 1 | what | where | `radix/test_gone.py::test_a` |\n| 2 | what | where | `radix/test_tree.py::test_gone` |"
    tests = [test for row in rows(page).values() for test in named_tests(row)]
    assert tests == [("radix/test_gone.py", "test_a"), ("radix/test_tree.py", "test_gone")]
    assert all(test not in functions(file) for file, test in tests)
    with pytest.raises(AssertionError, match="1 has two rows"):
        rows("| 1 | a | b | c |\n| 1 | a | b | c |")

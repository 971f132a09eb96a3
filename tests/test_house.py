"""Keeps the house in order: sizes, links, pins and the files that a package needs."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "loadtests/*.md") for path in ROOT.glob(pattern)
)


def load_sizes():
    spec = importlib.util.spec_from_file_location("sizes", ROOT / ".ci" / "sizes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIZES = load_sizes()
SOURCES = {name: lines for files in SIZES.source_files(ROOT).values() for name, lines in files.items()}


def links() -> dict[str, Path]:
    """Name in trunkline/ -> the folder it links to."""
    return {path.name: path.resolve() for path in (ROOT / "trunkline").iterdir() if path.is_symlink()}


def test_no_file_holds_two_ideas() -> None:
    long = {name: lines for name, lines in SOURCES.items() if lines > SIZES.CEILING}
    assert not long, f"over {SIZES.CEILING} lines: split them"
    assert len(SOURCES) > 20


def test_nothing_is_left_for_later() -> None:
    markers = re.compile(rf"\b({'|'.join(('TO' + 'DO', 'FIX' + 'ME', 'X' * 3))})\b")
    assert not [name for name in SOURCES if markers.search((ROOT / name).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets += re.findall(r'(?:src|href)="([^"]+)"', page.read_text(encoding="utf-8"))
    for target in targets:
        if not re.match("[a-z]+:", target):
            path, _, anchor = target.partition("#")
            file = page if not path else page.parent / path
            assert file.exists(), f"{target} does not exist"
            if anchor:
                assert anchor in anchors(file), f"{path or page.name} has no heading #{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_folder_is_linked_under_the_import_root() -> None:
    assert links() == {name: ROOT / name for name in links()}
    assert all(
        (ROOT / name / "__init__.py").exists() == (name != "kernels") for name in links()
    )  # see docs/architecture.md


def test_tools_see_each_file_once() -> None:
    assert {f"trunkline/{name}" for name in links()} == set(PROJECT["tool"]["ruff"]["extend-exclude"])
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(links()) == set(banned)
    assert set(links()) | {"trunkline", "tests", "benchmarks", "loadtests"} == set(
        PROJECT["tool"]["pyright"]["include"]
    )


def test_no_folder_has_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "core", "helpers", "misc"}
    assert not [name for name in SOURCES if vague & {Path(part).stem for part in Path(name).parts}]


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {(ROOT / name).parent for name in SOURCES if name.startswith("tests/")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_every_dependency_is_pinned_for_ci() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    pinned = {canonical(line.split("==")[0]) for line in pins.splitlines() if "==" in line}
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["gpu"],
    ]
    names = {canonical(re.split(r"[^\w.-]", requirement)[0]) for requirement in wanted}
    assert names <= pinned, f"missing in constraints.txt: {sorted(names - pinned)}"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def test_a_wheel_carries_every_file_the_code_reads() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    folders = [ROOT / "trunkline", *links().values()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    data = [path for path in files if path.suffix not in (".py", ".pyc", ".so")]
    forgotten = [path for path in data if not any(path.match(pattern) for pattern in patterns)]
    assert not forgotten, f"add to package-data in pyproject.toml: {forgotten}"


def make(*arguments: str) -> str:
    return subprocess.run(["make", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


def test_make_help_lists_every_target() -> None:
    listed = set(re.findall(r"^make ([a-z-]+)", make("help"), flags=re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony is not None and listed == set(phony[1].split())


def test_make_passes_flags_on() -> None:
    assert "-m trunkline serve --port 8100 --seed 3" in make("--dry-run", "serve", "ARGS=--port 8100 --seed 3")
    assert "--dist worksteal -k tree" in make("--dry-run", "test-fast", "ARGS=-k tree")


def test_make_tells_when_python_is_ignored(tmp_path: Path) -> None:
    def told(*arguments: str) -> bool:
        makefile = f"--file={ROOT / 'Makefile'}"
        return "PYTHON=python3.12 is ignored" in make("-C", str(tmp_path), makefile, "--dry-run", *arguments)

    for needed in ("pyproject.toml", "constraints.txt"):
        (tmp_path / needed).touch()
    assert not told("serve", "PYTHON=python3.12"), "there is no .venv yet"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "pip").touch()
    assert told("serve", "PYTHON=python3.12")
    assert not told("clean", "PYTHON=python3.12")
    assert not told("serve", "PYTHON=")

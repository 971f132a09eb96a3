"""What people install: the wheel, built from the checkout and from the sdist, holds all of Trunkline and nothing else, and serves."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import trunkline
from tests.api.serving import PATIENCE, Server

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = sorted(path.name for path in (ROOT / "trunkline").iterdir() if path.is_symlink())
NEEDED = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "constraints.txt", "trunkline")


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"] and "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trunkline.__version__"}


def test_the_changelog_tells_of_this_version_first() -> None:
    """Keep a Changelog's form: the newest version first, each with a date, the one at work "unreleased"; only known kinds of change."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", text, flags=re.MULTILINE)
    assert len(sections) == len(re.findall("^## ", text, flags=re.MULTILINE)), "a section is `## [1.2.3] - 2026-12-31`"
    assert sections[0][0] == trunkline.__version__
    numbers = [tuple(map(int, version.split("."))) for version, _ in sections]
    assert numbers == sorted(set(numbers), reverse=True)
    dates = [date for _, date in sections if date != "unreleased"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
    assert len(dates) >= len(sections) - 1, "only the newest can be unreleased"
    kinds = set(re.findall("^### (.+)$", text, flags=re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packages are made of, links as links: building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in (*NEEDED, *FOLDERS):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def build(kind: str, source: Path, into: Path) -> Path:
    """A "wheel" or "sdist" by this environment's setuptools."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


def carried(source: Path) -> set[str]:
    """Every file below trunkline/, through the links."""
    found: set[str] = set()
    for folder, _, names in os.walk(source / "trunkline", followlinks=True):
        found.update((Path(folder) / name).relative_to(source).as_posix() for name in names)
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_trunkline_and_no_other_name(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = HeaderParser().parsestr(
            archive.read(f"trunkline-{trunkline.__version__}.dist-info/METADATA").decode()
        )
    assert {name for name in names if not name.startswith(f"trunkline-{trunkline.__version__}.dist-info/")} == carried(
        source
    )
    assert "trunkline/py.typed" in names and "trunkline/kernels/cpu_src/attention.c" in names
    assert metadata["Version"] == trunkline.__version__ and metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    """In it the linked folders are real ones, below trunkline/."""
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"trunkline-{trunkline.__version__}"
    assert all((unpacked / "trunkline" / name).is_dir() for name in FOLDERS)
    assert (unpacked / "CHANGELOG.md").is_file()
    again = build("wheel", unpacked, tmp_path)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert set(one.namelist()) == set(other.namelist())


@pytest.mark.slow
@pytest.mark.real
def test_what_is_installed_serves_from_anywhere(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new environment with the wheel alone; what it depends on is found in this one's folder."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    assert {path.name for path in packages.iterdir()} == {"trunkline", wheel.name.split("-py3")[0] + ".dist-info"}
    # A .pth adds a folder without reading the .pth files in it: the checkout itself stays out.
    libraries = [path for path in sys.path if path.endswith("-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    where = subprocess.run(
        [str(python), "-c", "import trunkline; print(trunkline.__file__)"], capture_output=True, text=True, check=True
    )
    assert Path(where.stdout.strip()).is_relative_to(packages)
    command = subprocess.run([python.with_name("trunkline"), "--version"], capture_output=True, text=True, check=True)
    assert command.stdout == f"trunkline {trunkline.__version__}\n"
    with Server(None) as server:
        server.wait_ready()
        question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            answer = json.load(response)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."

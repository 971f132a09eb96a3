"""Which folder may import which (docs/architecture.md), read from the source with `ast`; nothing is imported here.

An import inside a function counts as well: lazy loading makes a program start faster, not its layers right.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What all processes share; any folder may import these from trunkline/.
SHARED = (
    "__version__",
    "child",
    "config",
    "constraint",
    "errors",
    "inputs",
    "logs",
    "messages",
    "outputs",
    "sampling",
    "step",
    "traces",
    "units",
)

# Folder -> what of ours it may import besides itself and SHARED.
MAY_IMPORT = {
    "radix": (),
    "kernels": (),
    "models": ("kernels",),
    "workers": ("models", "kernels", "gpu_driver"),
    "grammar": ("models.tokenizer",),
    "scheduler": ("radix", "grammar"),
    "api": ("models.tokenizer", "models.checkpoint", "models.hub", "models.pooling", "grammar", "async_llm"),
    "trunkline/bench": ("models.tokenizer", "models.checkpoint", "models.hub", "radix", "grammar"),
}

# Single files that may import more, and why.
EXCEPTIONS = {
    "scheduler/engine.py": ("workers",),  # the engine loop drives the worker of rank 0
    "scheduler/process.py": ("workers",),  # and its process loads it
}

# Folders whose code must run where torch is not loaded: the tree and the queue are tested in microseconds, and the HTTP
# process stays small.
WITHOUT_TORCH = ("radix", "scheduler", "api", "trunkline/bench")

# Modules that must not load torch even through what they import.
STARTS_WITHOUT_TORCH = ("trunkline", "trunkline.__main__", "trunkline.async_llm", "trunkline.api", "trunkline.bench")


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name; `late` if it stands inside a function or under TYPE_CHECKING."""

    module: str
    line: int
    late: bool


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, `from a import b` as both a and a.b. A relative one starts with a dot."""

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, late) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = "." * child.level + (child.module or "")
                yield Import(module, child.lineno, late)
                yield from (Import(f"{module}.{alias.name}", child.lineno, late) for alias in child.names)
            else:
                checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, late or checking or function)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), late=False)


def sources(root: Path, folder: str) -> list[Path]:
    """Python files in a folder. Links are not followed: trunkline/radix is the folder radix."""
    return sorted(
        path
        for path in (root / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents if parent != root)
    )


def covers(allowed: str, module: str) -> bool:
    return module == allowed or module.startswith(f"{allowed}.") or allowed.startswith(f"{module}.")


def violations(root: Path) -> list[str]:
    """Every import against the rules, as a sentence with file, line and rule."""
    found = []
    for folder, others in MAY_IMPORT.items():
        own = folder.removeprefix("trunkline/")
        for path in sources(root, folder):
            name = path.relative_to(root).as_posix()
            allowed = (own, *SHARED, *others, *EXCEPTIONS.get(name, ()))
            rule = (
                f"{folder}/ may import {', '.join(others) or 'nothing of ours'} besides trunkline's {', '.join(SHARED)}"
            )
            for one in imports_of(path):
                where = f"{name}:{one.line} imports {one.module}"
                top, _, inner = one.module.partition(".")
                if one.module.startswith("."):
                    found.append(f"{where}: relative imports are not used; write trunkline.{own}")
                elif top in MAY_IMPORT:
                    found.append(f"{where}: a second copy would be loaded; write trunkline.{one.module}")
                elif top == "torch" and folder in WITHOUT_TORCH:
                    found.append(f"{where}: {folder}/ must not import torch")
                elif top == "trunkline" and inner and not any(covers(module, inner) for module in allowed):
                    found.append(f"{where}: {rule}")
    return found


def module_files(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for everything under trunkline/ and the folders it links to."""
    found = {}
    for folder in ("trunkline", *(folder for folder in MAY_IMPORT if "/" not in folder)):
        for path in sources(root, folder):
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts if parts[0] == "trunkline" else ("trunkline", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def chain_to_torch(root: Path, start: str) -> list[str] | None:
    """Modules that import one another at start-up, from `start` to one that imports torch; None if none does.

    A package stands for all modules in it, except trunkline itself, which stands for its `__init__` alone.
    """
    files = module_files(root)
    inside = "" if start == "trunkline" else f"{start}."
    chains = [[name] for name in files if name == start or (inside and name.startswith(inside))]
    assert chains, f"there is no module {start}"
    seen = {chain[0] for chain in chains}
    for chain in chains:
        for one in imports_of(files[chain[-1]]):
            if one.late:
                continue
            if one.module.partition(".")[0] == "torch":
                return [*chain, "torch"]
            if one.module in files and one.module not in seen:
                seen.add(one.module)
                chains.append([*chain, one.module])
    return None


def test_folders_import_downwards() -> None:
    assert not (found := violations(ROOT)), "\n".join(found)


@pytest.mark.parametrize("module", STARTS_WITHOUT_TORCH)
def test_starts_without_torch(module: str) -> None:
    chain = chain_to_torch(ROOT, module)
    assert chain is None, " → ".join(chain or ())


def test_every_linked_folder_has_a_rule() -> None:
    linked = {path.name for path in (ROOT / "trunkline").iterdir() if path.is_symlink()}
    assert linked == {folder for folder in MAY_IMPORT if "/" not in folder}


@pytest.mark.parametrize(
    ("file", "code", "says"),
    [
        (
            "radix/tree.py",
            "from trunkline.scheduler.policy import lpm",
            "radix/tree.py:1 imports trunkline.scheduler.policy: radix/",
        ),
        (
            "radix/tree.py",
            "from trunkline import scheduler",
            "imports trunkline.scheduler: radix/ may import nothing of ours",
        ),
        (
            "radix/tree.py",
            "def f():\n    import torch.nn",
            "radix/tree.py:2 imports torch.nn: radix/ must not import torch",
        ),
        ("kernels/cpu.py", "import trunkline.models.config", "kernels/ may import nothing of ours"),
        ("api/chat.py", "import trunkline.scheduler.engine", "api/ may import models.tokenizer"),
        ("api/chat.py", "import trunkline.models.llama", "api/ may import models.tokenizer"),
        ("grammar/lint.py", "import radix.tree", "write trunkline.radix.tree"),
        ("models/llama.py", "from .layers import Linear", "relative imports are not used"),
        ("scheduler/scheduler.py", "import trunkline.workers.worker", "scheduler/ may import radix, grammar"),
        ("workers/worker.py", "import trunkline.async_llm", "workers/ may import models, kernels"),
        ("trunkline/bench/cli.py", "import trunkline.api.app", "trunkline/bench/ may import models.tokenizer"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, code: str, says: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert any(says in sentence for sentence in violations(tmp_path))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("scheduler/engine.py", "def start():\n    from trunkline.workers.worker import load_worker"),
        (
            "scheduler/scheduler.py",
            "from trunkline.radix.cache import PrefixCache\nfrom trunkline.errors import RequestError",
        ),
        ("workers/worker.py", "import torch\nfrom trunkline.models.checkpoint import open_checkpoint"),
        ("api/chat.py", "from trunkline import errors\nfrom trunkline.models import tokenizer"),
        ("radix/cache.py", "import numpy\nimport trunkline.radix.tree"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, code: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert violations(tmp_path) == []


def test_torch_behind_another_module_is_found(tmp_path: Path) -> None:
    for file, code in {
        "api/app.py": "from trunkline.models.tokenizer import load_tokenizer",
        "models/tokenizer.py": "if True:\n    from trunkline.models import layers",
        "models/layers.py": "import torch",
        "models/late.py": "def f():\n    import torch",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(code)
    assert chain_to_torch(tmp_path, "trunkline.api") == [
        *("trunkline.api.app", "trunkline.models.tokenizer", "trunkline.models.layers", "torch")
    ]
    assert chain_to_torch(tmp_path, "trunkline.models.late") is None

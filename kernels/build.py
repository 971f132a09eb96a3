"""Compiles the C sources of the CPU kernels for this machine, once, into the user's cache.

    library = build_library()            # Path of a shared library, compiled now or before; raises BuildError
    build_ahead()                        # begins to, in a thread; build_library() then waits for it
    python -m trunkline.kernels.build    # the same ahead of time, e.g. while a container image is made

There is no build step at installation: what is compiled must fit the machine that runs it, not the one that packed it, and a
package without binaries installs everywhere. The C includes none of Python's headers, so any `cc` will do. Libraries are kept in
$XDG_CACHE_HOME/trunkline/kernels (~/.cache by default) under digests of all that went into them: sources, flags and compiler.
Nobody else may write there: a library is code. Where the compiler is gone, a library that one made earlier still serves.

A first start waits for this, so each source file has a compiler of its own, as many at a time as there are CPUs; and torch, whose import
takes as long, is not needed here.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent / "cpu_src"
COMPILE_SECONDS = 300
COMMON_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",  # a * b + c is rounded twice unless the source says fma8: the same everywhere, whatever gets inlined
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
    "-Wno-psabi",  # vectors are passed between inlined functions only
)
AVX2 = ("avx2", "fma", "f16c")
EXTENSIONS = {  # of x86-64, by target, the fastest first: what a processor must have, as compilers call it
    "avx512": (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"),
    "avx2": AVX2,
}
TARGET_FLAGS = {  # never -march=native: the cache may be a network drive, shared by different machines
    **{target: tuple(f"-m{name}" for name in names) for target, names in EXTENSIONS.items()},
    "baseline": (),  # SSE2 on x86-64, NEON on aarch64
}
LINK_FLAGS = ("-shared", "-pthread")
X86 = ("x86_64", "AMD64")  # platform.machine()

_building = threading.Lock()


class BuildError(Exception):
    """The library could not be built. The message completes the sentence "The CPU kernels are not compiled: …"."""


def detect_target() -> str:
    """The key of TARGET_FLAGS that this processor runs fastest."""
    present = _extensions() if platform.machine() in X86 else frozenset()
    return next((target for target, names in EXTENSIONS.items() if present.issuperset(names)), "baseline")


@cache
def _extensions() -> frozenset[str]:
    """What this processor has of EXTENSIONS, and more."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux: torch knows, but not of VNNI
        import torch

        return frozenset(AVX2 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else ())
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return frozenset(flag.replace("avx512_", "avx512") for flag in flags)  # Linux says avx512_vnni


def build_library(target: str | None = None) -> Path:
    """The shared library for `target` (None: this machine), compiled unless it has been already.

    Raises BuildError if there is no compiler, or it fails.
    """
    if os.name != "posix":
        raise BuildError("the kernels need a POSIX system")
    with _building:
        return _build(TARGET_FLAGS[target or detect_target()])


def build_ahead() -> None:
    """Begin to compile for this machine, and return at once. What goes wrong, `build_library` will tell."""

    def build() -> None:
        with contextlib.suppress(BuildError):
            build_library()

    threading.Thread(target=build, name="kernels", daemon=True).start()


def _build(target_flags: tuple[str, ...]) -> Path:
    flags = (*COMMON_FLAGS, *target_flags)
    stem = f"kernels-{_digest_sources(flags)}"
    folder = _private_folder(default_cache())
    try:
        compiler = find_compiler()
    except BuildError:
        if found := next(folder.glob(f"{stem}-*.so"), None):
            return found
        raise
    library = folder / f"{stem}-{_digest(repr(compiler), _version(compiler))}.so"
    if not library.exists():
        logger.info("Compiling the CPU kernels with %s: some seconds, this once.", compiler[0])
        _compile([*compiler, *flags], [*compiler, *LINK_FLAGS], library)
    return library


def _digest_sources(flags: tuple[str, ...]) -> str:
    return _digest(
        repr(flags), *(f"{file.name}: {file.read_text(encoding='utf-8')}" for file in sorted(SOURCES.glob("*.[ch]")))
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def default_cache() -> Path:
    """Where libraries are kept. Raises BuildError if the user has no home folder."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError("there is no home folder to keep them in; set XDG_CACHE_HOME") from error
    return Path(home) / "trunkline" / "kernels"


def find_compiler() -> list[str]:
    """The command in $CC, or the first of cc, gcc, clang there is. Raises BuildError."""
    if named := shlex.split(os.environ.get("CC", "")):
        return named
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C compiler (cc, gcc or clang) here; install one")


def _version(compiler: list[str]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{shlex.join(compiler)} does not run ({error})") from error


def _private_folder(folder: Path) -> Path:
    """`folder`, made if need be; a temporary one, compiled into anew by each process, if it can't be had or is not ours alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if (
            status.st_uid == os.getuid()
            and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and os.access(folder, os.W_OK)
        ):
            return folder
    except OSError:
        pass  # a read-only home, a file in the way: the temporary folder serves as well, only not for the next process
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    """One for the process, removed at its end."""
    folder = tempfile.mkdtemp(prefix="trunkline-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _compile(compiler: Sequence[str], linker: Sequence[str], library: Path) -> None:
    """Make `library` of all sources. It appears in one step: another process sees all of it or nothing.

    compiler  command and flags that make an object file of a source file
    linker    command and flags that make a shared library of object files
    """
    sources = sorted(SOURCES.glob("*.c"), key=lambda file: -file.stat().st_size)  # what takes longest, first
    with tempfile.TemporaryDirectory(dir=library.parent, suffix=".tmp") as name:
        folder = Path(name)
        objects = [folder / f"{source.stem}.o" for source in sources]
        commands = [
            [*compiler, "-c", str(source), "-o", str(made)] for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            list(threads.map(_run, commands))
        unfinished = folder / library.name
        _run([*linker, *map(str, objects), "-lm", "-o", str(unfinished)])
        os.replace(unfinished, library)


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {COMPILE_SECONDS} s") from error
    except OSError as error:
        raise BuildError(f"{command[0]} does not run ({error})") from error
    if result.returncode != 0:
        complaint = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip())
        raise BuildError(f"{command[0]} fails with code {result.returncode}: {complaint}")


if __name__ == "__main__":
    try:
        print(build_library())
    except BuildError as error:
        sys.exit(f"The CPU kernels are not compiled: {error}.")

"""`make kernels-aot`: compile every kernel in every shipped configuration, for GPUs that need not be here, and look at the result.

    python -m benchmarks.kernels_aot                    # all of it, and write benchmarks/kernels-aot.md
    python -m benchmarks.kernels_aot --arch 90          # one architecture; the others keep their part of the page
    python -m benchmarks.kernels_aot --quick            # what `make check` does: sm_90 whole, of the others a sample; no page

The compiler takes a kernel that spills its registers into memory, or wants more shared memory than the chip has: the one
is slow, the other fails at its first launch. So both fail here, one sentence each, and so do the other promises of
kernels/triton/spec.py. Nothing is compiled twice: Triton's own cache (TRITON_CACHE_DIR) keeps it.
"""

import argparse
import functools
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from trunkline.bench.tables import align
from trunkline.kernels.triton import interpreter
from trunkline.kernels.triton.spec import ARCHS, KernelSpec

PAGE = Path(__file__).with_name("kernels-aot.md")
PACKAGE = "trunkline.kernels.triton"

QUICK_ARCH = 90  # compiled whole by `make check`
SHARED_LIMIT = {
    80: 166_912,
    90: 232_448,
    100: 232_448,
}  # bytes a block may have; CUDA C++ programming guide, compute capabilities
REGISTERS = 65_536  # of a multiprocessor, and of a block, on all of them
COUNTED = ("HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "LDG.E.128")

HEAD = """# The kernels, compiled ahead of time

Written by `make kernels-aot`, which needs no GPU and fails on any promise that is broken ([what it checks](../docs/gpu.md#the-gate-without-a-gpu)).
Nothing here is a measurement of speed.

- **registers** of a thread, **shared** memory of a block in bytes, **stack** of a thread in bytes: anything but 0 is a spill.
- Instructions in the machine code, counted once however often a loop runs them: **HMMA** and **HGMMA** (wgmma) and **UTCHMMA** (tcgen05)
  multiply matrices, **LDGSTS** copies from memory to shared memory without waiting, **LDG.E.128** loads 16 bytes a thread.
- **ieee**: products of float32 are exact float32, not TF32; – where there are none.
"""


class Job(NamedTuple):
    """A spec by where it is found, since a process that compiles it can't be sent a function: `specs(arch)[place]` of a module.

    counted  whether its instructions are to be counted, too, which takes as long as compiling; those that it needs are in any case
    """

    module: str
    arch: int
    place: int
    counted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What the machine code of a kernel takes.

    registers, stack, local   of a thread; stack and local in bytes
    counts                    instructions by name
    """

    registers: int
    stack: int
    local: int
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A spec after compilation.

    shared             bytes of a block
    multiplies_float32 whether a product of float32 matrices is in it
    tf32               whether such a product is rounded to TF32
    """

    name: str
    arch: int
    needs: tuple[str, ...]
    threads: int
    shared: int
    resources: Resources
    multiplies_float32: bool
    tf32: bool


def modules() -> list[str]:
    """The modules of kernels that have something to compile."""
    package = importlib.import_module(PACKAGE)
    names = [f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    return [name for name in sorted(names) if hasattr(importlib.import_module(name), "specs")]


@functools.cache
def specs(module: str, arch: int) -> tuple[KernelSpec, ...]:
    return tuple(importlib.import_module(module).specs(arch))


def jobs(names: Iterable[str], archs: Iterable[int], *, quick: bool) -> list[Job]:
    """What there is to compile. `quick` leaves out what is not marked so, except for QUICK_ARCH."""
    return [
        Job(name, arch, place, not quick)
        for arch in archs
        for name in names
        for place, spec in enumerate(specs(name, arch))
        if not quick or spec.quick or arch == QUICK_ARCH
    ]


def compile_job(job: Job) -> Compiled | str:
    """The spec compiled, or a sentence that says why it can't be."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = specs(job.module, job.arch)[job.place]
    where = f"{spec.name} for sm_{job.arch}"
    if wrong := misdescribed(spec, specs(job.module, job.arch)):
        return f"{where}: {wrong}"
    names = spec.kernel.arg_names
    types = {name: spec.types.get(name, "constexpr") for name in names}
    source = ASTSource(
        spec.kernel,
        {name: kind.removesuffix(":16") for name, kind in types.items()},
        dict(spec.constants),
        _attributes(list(types.values())),
    )
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", job.arch, 32), options=spec.config.options)
    except Exception as error:  # noqa: BLE001 - Triton's errors have no common base
        return f"{where} does not compile: {str(error).strip().splitlines()[-1]}"
    return Compiled(
        name=spec.name,
        arch=job.arch,
        needs=spec.needs,
        threads=compiled.metadata.num_warps * 32,
        shared=compiled.metadata.shared,
        resources=read_resources(compiled.asm["cubin"], (*COUNTED, *spec.needs) if job.counted else spec.needs),
        multiplies_float32=bool(re.search(r"tt\.dot [^\n]*: tensor<\w+xf32> \* ", compiled.asm["ttir"])),
        tf32="tf32" in compiled.asm["ptx"],
    )


def _attributes(types: Sequence[str]) -> dict[tuple[int], list[list[object]]]:
    """As a launch writes them down: it finds in the cache what was compiled with these."""
    divisible: list[list[object]] = [["tt.divisibility", 16]]
    known = {(place,): divisible if kind[0] == "*" or kind.endswith(":16") else [] for place, kind in enumerate(types)}
    return {place: found for place, found in known.items() if found or types[place[0]] == "constexpr"}


def misdescribed(spec: KernelSpec, others: Iterable[KernelSpec] = ()) -> str:
    """What is wrong with a spec's arguments, as a clause; "" if nothing is. `others` are shipped with it.

    A launch compiles anew for an integer that is 1, or divisible by 16, unless it is told not to look: then what is launched
    would not be what was compiled here, and compiling would hold up whoever is being served.
    """
    given = set(spec.types) | set(spec.constants)
    if given != set(spec.kernel.arg_names):
        return f"its spec names arguments that are not the kernel's: {', '.join(sorted(given ^ set(spec.kernel.arg_names)))}."
    alike = [other for other in (*others, spec) if other.kernel is spec.kernel]
    for parameter in spec.kernel.params:
        name, kind = parameter.name, spec.types.get(parameter.name, "")
        is_looked_at = re.fullmatch(r"[iu]\d+", kind) and not parameter.do_not_specialize
        if is_looked_at and not any(other.types[name] == f"{kind}:16" for other in alike):
            return (
                f"a launch looks at the value of {name}; name it in do_not_specialize, or its type {kind}:16, in another spec"
                " at least."
            )
        if re.fullmatch(r"[iu]\d+:16", kind) and parameter.do_not_specialize:
            return f"a launch doesn't look at the value of {name}, so it can't know that 16 divides it; its type is {kind[:-3]}."
    return ""


def read_resources(cubin: bytes, instructions: Sequence[str]) -> Resources:
    """Of machine code, through Triton's own cuobjdump; kept in Triton's cache, for to count instructions it must disassemble."""
    from triton import knobs

    digest = hashlib.sha256(cubin + " ".join(instructions).encode()).hexdigest()
    kept = Path(knobs.cache.dir) / f"resources-{digest}.json"
    if kept.exists():
        return Resources(**json.loads(kept.read_text()))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [
            knobs.nvidia.cuobjdump.path,
            "--dump-resource-usage",
            *["--dump-sass"] * bool(instructions),
            file.name,
        ]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert usage is not None, text[:500]
    counts = {name: len(re.findall(rf"\b{re.escape(name)}\b", text)) for name in instructions}
    found = Resources(registers=int(usage[1]), stack=int(usage[2]), local=int(usage[3]), counts=counts)
    temporary = kept.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(found)))
    temporary.replace(kept)
    return found


def defects(one: Compiled) -> Iterator[str]:
    """What is wrong with a kernel, a sentence each."""
    where, used = f"{one.name} for sm_{one.arch}", one.resources
    if used.stack or used.local:
        yield (
            f"{where} spills: {used.stack} bytes of stack and {used.local} of local memory a thread, with {used.registers} registers; "
            "take smaller blocks, or more warps."
        )
    if one.shared > SHARED_LIMIT[one.arch]:
        yield (
            f"{where} wants {one.shared:,} bytes of shared memory, allowed are {SHARED_LIMIT[one.arch]:,}; "
            "take smaller blocks, or fewer stages."
        )
    if used.registers * one.threads > REGISTERS:
        yield f"{where} wants {used.registers} registers for each of {one.threads} threads; there are {REGISTERS:,} in all."
    if one.needs and not any(used.counts[name] for name in one.needs):
        yield f"{where} holds no {' or '.join(one.needs)}; it must, or its blocks do not fit the instruction."
    if one.tf32:
        yield f"{where} rounds float32 to TF32; give tl.dot input_precision='ieee'."


def compile_all(work: Sequence[Job], processes: int) -> tuple[list[Compiled], list[str]]:
    """Everything compiled, in the order of `work`, and the sentences about what is wrong."""
    done: list[Compiled] = []
    wrong: list[str] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures: dict[Job, Future[Compiled | str]] = {job: pool.submit(compile_job, job) for job in work}
        for job, future in tqdm(futures.items(), unit="kernel", disable=not sys.stderr.isatty()):
            try:
                result = future.result()
            except BrokenProcessPool:
                name = specs(job.module, job.arch)[job.place].name
                wrong.append(
                    f"The compiler crashed at {name} for sm_{job.arch}, or at one of the {processes} behind it."
                )
                break
            if isinstance(result, str):
                wrong.append(result)
            else:
                done.append(result)
                wrong += defects(result)
    return done, wrong + twice(done)


def twice(done: Iterable[Compiled]) -> list[str]:
    """Names that do not tell kernels apart."""
    seen: set[tuple[int, str]] = set()
    found = []
    for one in done:
        if (one.arch, one.name) in seen:
            found.append(f"{one.name} for sm_{one.arch} is the name of two specs.")
        seen.add((one.arch, one.name))
    return found


def table(done: Iterable[Compiled]) -> str:
    rows: list[tuple[str, ...]] = [("kernel", "threads", "registers", "shared", "stack", *COUNTED, "ieee")]
    for one in done:
        used = one.resources
        counts = (str(used.counts[name]) for name in COUNTED)
        ieee = "–" if not one.multiplies_float32 else "no" if one.tf32 else "yes"
        numbers = (str(one.threads), str(used.registers), f"{one.shared:,}", str(used.stack))
        rows.append((one.name, *numbers, *counts, ieee))
    return align(rows)


def write_page(page: Path, parts: dict[int, str]) -> None:
    """Replace these architectures' parts of the page; the others stay."""
    old = re.split(r"^## sm_(\d+)\n", page.read_text() if page.exists() else "", flags=re.MULTILINE)
    every = {int(arch): text.strip() for arch, text in zip(old[1::2], old[2::2], strict=True)} | parts
    page.write_text(HEAD + "".join(f"\n## sm_{arch}\n\n{every[arch]}\n" for arch in sorted(every)), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels_aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ",".join(map(str, ARCHS))
    parser.add_argument("--arch", default=known, metavar="N,N", help="compute capabilities (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help=f"sm_{QUICK_ARCH} whole, of the others what is marked quick"
    )
    parser.add_argument(
        "--module", nargs="+", metavar="NAME", help="modules with `specs` (default: all of kernels/triton)"
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that compile side by side (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: benchmarks/kernels-aot.md)")
    args = parser.parse_args(argv)
    if interpreter.is_on():
        parser.error("TRITON_INTERPRET is 1: there is nothing to compile then; unset it")
    archs = [int(arch) if arch in known.split(",") else 0 for arch in args.arch.split(",")]
    if 0 in archs:
        parser.error(f"--arch is {args.arch}; allowed are {known} and parts of it")

    import triton

    started = time.monotonic()
    work = jobs(args.module or modules(), archs, quick=args.quick)
    print(f"Compiling {len(work)} kernels, {args.processes} at a time: on two quiet cores two in a second.", flush=True)
    done, wrong = compile_all(work, args.processes)
    wrong += [f"There is not one kernel for sm_{arch}." for arch in archs if all(job.arch != arch for job in work)]
    took = time.monotonic() - started
    print(
        f"Triton {triton.__version__}: {len(done)} of {len(work)} kernels compiled in {took:.0f} s, {len(wrong)} defects."
    )
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    page = args.output or (None if wrong or args.module else PAGE)
    if page is not None and not args.quick:
        tables = {arch: table(one for one in done if one.arch == arch) for arch in archs}
        write_page(page, {arch: f"Triton {triton.__version__}.\n\n{text}" for arch, text in tables.items()})
        print(f"Written to {page}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

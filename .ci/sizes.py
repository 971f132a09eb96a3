"""Lines of code per folder, and the files that come near the ceiling: `python .ci/sizes.py`.

A file over the ceiling usually holds two ideas; tests/test_house.py fails on one.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILING = 500  # lines of one source file
SUFFIXES = (".py", ".c", ".h")
FOLDERS = (
    *("trunkline", "radix", "scheduler", "kernels", "models", "workers", "grammar", "api", "router"),
    *("benchmarks", "loadtests", "tests", ".ci"),
)


def source_files(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Folder -> path relative to `root` -> lines. The links trunkline/radix and so on are not followed: each file counts once."""
    found: dict[str, dict[str, int]] = {}
    for folder in FOLDERS:
        files = {}
        for path in sorted((root / folder).rglob("*")):
            inside_link = any(parent.is_symlink() for parent in [path, *path.parents] if parent != root)
            if path.suffix in SUFFIXES and path.is_file() and not inside_link:
                files[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8").count("\n")
        if files:
            found[folder] = files
    return found


def main() -> None:
    found = source_files()
    print(f"{'folder':12} {'files':>5} {'lines':>7}   longest")
    for folder, files in found.items():
        longest = max(files, key=files.__getitem__)
        print(f"{folder:12} {len(files):5} {sum(files.values()):7,}   {longest} ({files[longest]})")
    code = sum(sum(files.values()) for folder, files in found.items() if folder != "tests")
    tests = sum(found.get("tests", {}).values())
    print(f"{code:,} lines of code, {tests:,} of tests; a file may have {CEILING}")


if __name__ == "__main__":
    main()

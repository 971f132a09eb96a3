"""`trunkline cache`: what a running server has cached, why a prompt is not, and who waits, in the terminal. Standard library only.

tokens  hits  saved  last used  tier    prefix
   512     9  4,608        3 s  device  └─ <|im_start|>system⏎You answer questions about our shop.…
    32     2     64       12 s  device     ├─ When do you open?<|im_end|>⏎…
    16     0      0       40 s  device     └─ Where are you?<|im_end|>⏎…
"""

import argparse
import json
import os
import shutil
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline.cli_parser import add_command, add_url
from trunkline.config import API_KEY_VARIABLE
from trunkline.errors import ConfigError

if TYPE_CHECKING:
    from trunkline.cli_client import ApiClient

WIDTH = 120  # characters of a line where there is no terminal
EXAMPLES = {
    "tree": ("cache tree", "cache tree --depth 3 --limit 20 --url http://127.0.0.1:8100"),
    "explain": (
        "cache explain 'When do you open?' --system 'You answer questions about our shop.'",
        "cache explain --request body.json",
    ),
    "queue": ("cache queue", "cache queue --json"),
}
COLUMNS = ("tokens", "hits", "saved", "last used", "tier", "prefix")


def add_arguments(kinds: "argparse._SubParsersAction[Any]") -> None:
    """The commands under `trunkline cache`."""
    tree = _command(kinds, "tree", "draw the prefix tree: what is cached, and what it has saved", show_tree)
    tree.add_argument("--depth", type=int, metavar="N", default=8, help="nodes below each other")
    tree.add_argument("--limit", type=int, metavar="N", default=50, help="nodes in all, those that saved most")
    tree.add_argument("--tenant", metavar="ID", help="with the admin key: of this tenant only")
    explain = _command(kinds, "explain", "say how much of a prompt is cached, and why not more", show_explanation)
    explain.add_argument("text", nargs="?", metavar="TEXT", help="a user's message")
    explain.add_argument("--system", metavar="TEXT", help="the system message before it")
    explain.add_argument("--raw", action="store_true", help="TEXT is a whole prompt, without a chat template")
    explain.add_argument("--request", metavar="FILE", help="the body of a request as JSON, instead of TEXT; -: stdin")
    queue = _command(kinds, "queue", "list who runs, who waits, and why", show_queue)
    queue.add_argument("--tenant", metavar="ID", help="with the admin key: of this tenant only")


def show_tree(args: argparse.Namespace) -> int:
    """Draw the tree, a table for each tenant, salt and adapter, then what more memory would bring."""
    tree = _get(args, "/cache/tree", depth=args.depth, limit=args.limit, top=0, tenant=args.tenant)
    if args.json:
        return _print_json(tree)
    if not tree["namespaces"]:
        print("Nothing is cached.")
    for namespace in tree["namespaces"]:
        names = [("tenant", namespace["tenant"]), ("salt", namespace["cache_salt"]), ("adapter", namespace["adapter"])]
        if title := ", ".join(f"{what} {printable(name)}" for what, name in names if name):
            print(title)
        print("\n".join(tree_lines(namespace, width=_width())), end="\n\n")
    for point in tree["reuse_curve"]:
        if point["times"] in (1, 2, 4):
            memory = "This memory" if point["times"] == 1 else f"{point['times']:g} times the memory"
            print(
                f"{memory} ({point['num_tokens']:,} tokens) finds {100 * point['hit_rate']:.1f} % of all prompt tokens."
            )
    return 0


def show_explanation(args: argparse.Namespace) -> int:
    """Print the explanation of one prompt."""
    told = _client(args).fetch("/cache/explain", _request(args))
    if args.json:
        return _print_json(told)
    print(told["sentence"])
    return 0


def show_queue(args: argparse.Namespace) -> int:
    """List the requests in the engine, first in turn first."""
    queue = _get(args, "/queue", tenant=args.tenant)
    if args.json:
        return _print_json(queue)
    rows: list[tuple[str, ...]] = [("request", "tenant", "seconds", "prompt", "cached", "state")]
    for running in queue["running"]:
        read, generated = running["prompt_tokens_computed"], running["generated_tokens"]
        state = f"runs: {generated:,} tokens generated" if generated else f"runs: {read:,} tokens of its prompt read"
        rows.append((*_in_queue(running), state))
    rows += [(*_in_queue(waiting), f"waits: {waiting['why']}") for waiting in queue["waiting"]]
    print("\n".join(_columns(rows, right={2, 3, 4})) if len(rows) > 1 else "Nobody runs, and nobody waits.")
    return 0


def tree_lines(namespace: dict[str, Any], *, width: int) -> list[str]:
    """A table of the nodes, drawn as a tree. No line has more than `width` characters, if that is enough for the numbers."""
    rows = [COLUMNS, *_rows(namespace, "")]
    return [line[: width - 1] + "…" if len(line) > width else line for line in _columns(rows, right={0, 1, 2, 3})]


def printable(text: str) -> str:
    """Text as one line that moves no cursor: a newline as ⏎, what can't be seen as Python writes it."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else repr(c)[1:-1] for c in text)


def _rows(above: dict[str, Any], indent: str) -> Iterator[tuple[str, ...]]:
    """The rows of all nodes below one."""
    children, left_out = above["children"], above["left_out"]
    for number, node in enumerate(children, start=1):
        is_last = number == len(children) and not left_out
        yield (
            f"{node['num_tokens']:,}",
            f"{node['hits']:,}",
            f"{node['tokens_saved']:,}",
            _ago(node["last_use_seconds_ago"]),
            node["tier"] + (", pinned" if node["pinned"] else "") + (", in use" if node["references"] else ""),
            f"{indent}{'└─' if is_last else '├─'} {printable(node['text'])}",
        )
        yield from _rows(node, indent + ("   " if is_last else "│  "))
    if left_out:
        yield ("", "", "", "", "", f"{indent}└─ and {left_out:,} more")


def _in_queue(request: dict[str, Any]) -> tuple[str, ...]:
    return (
        request["request_id"],
        request["tenant"][:8] or "-",
        f"{request['seconds']:.1f}",
        f"{request['prompt_tokens']:,}",
        f"{request['cached_tokens']:,}",
    )


def _columns(rows: Sequence[Sequence[str]], *, right: set[int]) -> list[str]:
    """Cells below each other, those of the columns `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _ago(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds / length)} {unit}"
    return f"{int(seconds)} s"


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """The body to explain. Raises ConfigError if the flags name none, or more than one."""
    if (args.text is None) == (args.request is None):
        raise ConfigError("Give either TEXT or --request FILE.")
    if args.request is not None:
        if args.raw or args.system is not None:
            raise ConfigError("--raw and --system are about TEXT; with --request, the file says it all.")
        return _read_request(args.request)
    if args.raw:
        if args.system is not None:
            raise ConfigError("--raw takes TEXT as it is, so there is no place for --system; leave one of them out.")
        return {"prompt": args.text}
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return {"messages": [*system, {"role": "user", "content": args.text}]}


def _read_request(file: str) -> dict[str, Any]:
    try:
        body = json.loads(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--request is {file!r}, which can't be read as JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ConfigError(f"--request is {file!r}, which holds no JSON object.")
    return body


def _get(args: argparse.Namespace, path: str, **query: Any) -> Any:
    given = {name: value for name, value in query.items() if value is not None}
    return _client(args).fetch(f"{path}?{urllib.parse.urlencode(given)}")


def _client(args: argparse.Namespace) -> "ApiClient":
    from trunkline.cli_client import ApiClient

    return ApiClient(args.url, api_key=args.api_key or os.environ.get(API_KEY_VARIABLE) or None)


def _print_json(answer: Any) -> int:
    print(json.dumps(answer, indent=1, ensure_ascii=False))
    return 0


def _width() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def _command(kinds: "argparse._SubParsersAction[Any]", name: str, what: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = add_command(kinds, name, what, run, examples=EXAMPLES[name])
    add_url(command)
    command.add_argument("--api-key", metavar="KEY", default=argparse.SUPPRESS, help=f"(default: ${API_KEY_VARIABLE})")
    command.set_defaults(api_key=None)
    command.add_argument("--json", action="store_true", help="print the server's answer as it is")
    return command

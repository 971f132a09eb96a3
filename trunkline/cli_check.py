"""`trunkline grammar check`: whether a running server would follow a schema, by which backend, and what it costs."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from trunkline.cli_parser import Parser, add_command, add_group, add_url
from trunkline.config import API_KEY_VARIABLE, GRAMMAR_BACKENDS, UNSUPPORTED_POLICIES
from trunkline.errors import ConfigError
from trunkline.units import format_bytes


def add_grammar(commands: "argparse._SubParsersAction[Parser]") -> None:
    """The command under `trunkline grammar`."""
    kinds = add_group(commands, "grammar", "ask a running server about structured output")
    command = add_command(
        kinds,
        "check",
        "say whether a JSON schema would be followed, by which backend, and what it costs",
        _check,
        about="Nothing is generated. Exit code 1 if it would be refused.",
        examples=(
            "grammar check schema.json",
            "grammar check schema.json --backend xgrammar --unsupported validate",
            "grammar check --regex '[0-9]{4}-[0-9]{2}'",
            "grammar check --request body.json --json",
        ),
    )
    command.add_argument("file", nargs="?", metavar="FILE", help="a JSON schema; -: stdin")
    command.add_argument("--regex", metavar="REGEX", help="a regular expression in place of a schema")
    command.add_argument(
        "--request",
        metavar="FILE",
        help="the body of a request, as JSON: its response_format, tools and the like; -: stdin",
    )
    command.add_argument("--backend", choices=GRAMMAR_BACKENDS, help="ask this one (default: as the server does)")
    command.add_argument(
        "--unsupported",
        choices=UNSUPPORTED_POLICIES,
        help="what to do with what cannot be enforced (default: as the server does)",
    )
    add_url(command)
    command.add_argument("--api-key", metavar="KEY", help=f"(default: ${API_KEY_VARIABLE})")
    command.add_argument("--json", action="store_true", help="print the server's answer as it is")


def _check(args: argparse.Namespace) -> int:
    from trunkline.cli_client import ApiClient

    body = _body(args)
    if args.backend is not None:
        body["grammar_backend"] = args.backend
    if args.unsupported is not None:
        body["grammar_unsupported"] = args.unsupported
    client = ApiClient(args.url, api_key=args.api_key or os.environ.get(API_KEY_VARIABLE) or None)
    told = client.fetch("/grammar/check", body)
    print(json.dumps(told, indent=1, ensure_ascii=False) if args.json else "\n".join(lines(told)))
    return 0 if told["ok"] else 1


def lines(told: dict[str, Any]) -> list[str]:
    """The server's answer in words."""
    if told["ok"]:
        costs = [
            f"{words} {show(told[field])}"
            for field, words, show in (
                ("compile_ms", "compiled in", "{:,.4g} ms".format),
                ("mask_us", "a mask takes", "{:,.4g} µs".format),
                ("num_bytes", "it has", format_bytes),
                ("shortest_tokens", "tokens of a short text:", "{:,}".format),
            )
            if told.get(field) is not None
        ]
        found = [f"Taken, by {told['backend']}{': ' + ', '.join(costs) if costs else ''}"]
    else:
        found = [f"Refused: {told['error']}"]
    found += [
        f"  left to the check of the finished text: {_place(problem)}" for problem in told["findings"] if told["ok"]
    ]
    found += [
        f"  {name}: {'yes' if problem is None else _place(problem)}" for name, problem in told["backends"].items()
    ]
    return found


def _place(problem: dict[str, str]) -> str:
    return f"no, at {problem['pointer'] or '/'}: {problem['keyword']}: {problem['reason']}"


def _body(args: argparse.Namespace) -> dict[str, Any]:
    """What to ask. Raises ConfigError if the flags name nothing, or more than one thing."""
    if [args.file, args.regex, args.request].count(None) != 2:
        raise ConfigError("Give one of FILE, a JSON schema, --regex REGEX, and --request FILE.")
    if args.regex is not None:
        return {"guided_regex": args.regex}
    if args.file is not None:
        return {"guided_json": _read(args.file)}
    body = _read(args.request)
    if not isinstance(body, dict):
        raise ConfigError(f"--request is {args.request!r}, which holds no JSON object.")
    return body


def _read(file: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The file is {file!r}, which can't be read as JSON: {error}.") from None

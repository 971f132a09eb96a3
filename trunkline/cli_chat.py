"""`trunkline chat`, a conversation in the terminal with any server that speaks the OpenAI API, and `trunkline complete`, raw text."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from trunkline.cli_client import ApiClient, ServerError

COMMANDS = "/new starts over; /quit, /exit or Ctrl-D ends the chat; Ctrl-C cuts an answer short; /help prints this."


def chat(
    url: str,
    *,
    model: str | None = None,
    system: str | None = None,
    quick: str | None = None,
    api_key: str | None = None,
    options: Mapping[str, Any] | None = None,
    lines: TextIO | None = None,
) -> int:
    """Hold a conversation; returns the exit code. Raises StartupError if no server answers.

    quick  send this one message and return
    lines  where messages are read from, one a line; None: standard input
    """
    client = ApiClient(url, api_key=api_key, options=options)
    model = model or client.first_model()
    opening = [{"role": "system", "content": system}] if system else []
    if quick is not None:
        return 0 if _ask(client, model, [*opening, {"role": "user", "content": quick}]) is not None else 1
    print(f"Talking to {model} at {url}. /new starts over, /quit or Ctrl-D ends, /help lists the commands.")
    messages = list(opening)
    for line in read_lines(lines):
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                break
            case "/new":
                messages = list(opening)
                continue
            case "/help":
                print(COMMANDS)
                continue
            case "exit" | "quit":
                print(f"{line.strip()!r} is not sent: /quit, or Ctrl-D, ends the chat.", file=sys.stderr)
                continue
        if line.startswith("/"):
            word = line.split(maxsplit=1)[0]
            print(
                f"There is no {word}; /help lists what there is. With a space before it, the line is sent.",
                file=sys.stderr,
            )
            continue
        messages.append({"role": "user", "content": line})
        answer = _ask(client, model, messages)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})
    return 0


def _ask(client: ApiClient, model: str, messages: list[dict[str, str]]) -> str | None:
    """Print the answer, and say so if it had to end. Returns None if there is none."""
    answer = print_answer(client.answer(model, messages))
    if answer is not None and client.finish_reason == "length":
        print("The answer has reached --max-tokens, or the end of the context; it is cut off.", file=sys.stderr)
    return answer


def complete(
    url: str,
    *,
    model: str | None = None,
    quick: str | None = None,
    api_key: str | None = None,
    options: Mapping[str, Any] | None = None,
    lines: TextIO | None = None,
) -> int:
    """Continue texts, each for itself; returns the exit code. Raises StartupError if no server answers.

    quick  continue this one and return
    lines  where texts are read from, one a line; None: standard input
    """
    client = ApiClient(url, api_key=api_key, options=options)
    model = model or client.first_model()
    if quick is not None:
        return 0 if print_answer(client.complete(model, quick)) is not None else 1
    print(f"{model} at {url} continues what you write. /quit or Ctrl-D ends.")
    for line in read_lines(lines):
        if line.strip() in ("/quit", "/exit"):
            break
        if line.strip():
            print_answer(client.complete(model, line))
    return 0


def print_answer(pieces: Iterator[str]) -> str | None:
    """Print an answer as it comes; Ctrl-C cuts it short. Returns None if there is none."""
    printed = []
    try:
        for piece in pieces:
            printed.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except ServerError as error:
        print(f"trunkline: error: {error}", file=sys.stderr)
        return None
    print()
    return "".join(printed)


def read_lines(lines: TextIO | None) -> Iterator[str]:
    """Lines of a file, of a pipe, or of somebody who types."""
    if lines is None and not sys.stdin.isatty():
        lines = sys.stdin
    if lines is not None:
        yield from (line.rstrip("\n") for line in lines)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines and remembers them
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return

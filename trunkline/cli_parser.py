"""How the command line is read, and what it says about what it cannot read. Knows flags of other servers, but no command; of our
own flags it has the help of those that several commands share.

An error is one sentence that begins with the flag as it was typed: "--port is 'many'; allowed is an integer, such as 4096."
"""

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from trunkline.config import DEFAULT_URL, address
from trunkline.errors import ConfigError, shown
from trunkline.units import parse_bytes, parse_count

ALIKE = 0.8  # of difflib's 0 to 1: below that two flags share a word at most, and mean different things

_HOST_CACHE = "--host-cache-memory, a size such as 16GiB"

# Flags of llama-server, vLLM and SGLang that have another name in `trunkline serve`.
NAMES_HERE: Mapping[str, str] = {
    "-m": "--model",
    "--model-path": "--model",
    "--hf-file": "--model, as org/name/file.gguf",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "--chat-template-file": "--chat-template",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-waiting-requests",
    "-b": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--schedule-policy": "--scheduling-policy",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--kv-cache-memory-bytes": "--kv-cache-memory, a size such as 2GiB",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--disable-cuda-graph": "--enforce-eager",
    "-ctk": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "-t": "--threads",
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--draft-max": "--num-speculative-tokens",
    "--speculative-num-draft-tokens": "--num-speculative-tokens",
    "--swap-space": _HOST_CACHE,
    "--kv-offloading-size": _HOST_CACHE,
    "--enable-hierarchical-cache": _HOST_CACHE,
    "--hicache-size": _HOST_CACHE,
    "--hicache-ratio": _HOST_CACHE,
    "--cache-ram": _HOST_CACHE,
    "-cram": _HOST_CACHE,
    "--hicache-storage-backend": "--disk-cache-dir, a folder",
    "--slot-save-path": "--disk-cache-dir, a folder that is written and read by itself",
    "--radix-eviction-policy": "--eviction-policy",
    "--structured-outputs-config": "--grammar-backend, a name",
    "--disable-log-requests": "--no-enable-log-requests",
    "--log-requests": "--enable-log-requests",
    "--enable-trace": "--otlp-endpoint, a URL",
}

_ONE_DEVICE = "it is not there yet: several devices hold a model by --tensor-parallel-size only"
_WHOLE = "it is not there: all layers are on a GPU, or none; see --device"
_DRAFTS = "drafts come from the cache and the prompt, without a model: see --num-speculative-tokens"
_OF_REQUESTS = "requests bring their own: see docs/grammar.md"
_NO_ADAPTERS = "it is not there yet: there are no LoRA adapters"
_MEASURED = "leave it out: GET /metrics is always there"
_SECRET = "it would stand in the list of processes: put the token into $HF_TOKEN, or run hf auth login"
_ANY_TASK = "leave it out: every route is there, and POST /v1/embeddings takes any model; see --pooling"
_CORS = "it is not there: put a reverse proxy in front, which adds the headers of CORS"
_OF_A_PROXY = "it is not there: put a reverse proxy in front, which ends TLS and strips the path"

# Those that have no counterpart, and why.
NOT_HERE: Mapping[str, str] = {
    "--enable-prompt-tokens-details": "leave it out: usage always says cached_tokens",
    "--enable-cache-report": "leave it out: usage always says cached_tokens",
    "--enable-chunked-prefill": "leave it out: prefill is always chunked, as --max-num-batched-tokens says",
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "-ngl": _WHOLE,
    "--gpu-layers": _WHOLE,
    "--n-gpu-layers": _WHOLE,
    "--speculative-config": _DRAFTS,
    "--speculative-algorithm": _DRAFTS,
    "--model-draft": _DRAFTS,
    "-md": _DRAFTS,
    "--enable-lora": _NO_ADAPTERS,
    "--lora": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--lora-paths": _NO_ADAPTERS,
    "--kv-transfer-config": "KV is kept in host memory by --host-cache-memory and on disk by --disk-cache-dir, and is not sent to"
    " other engines",
    "--cache-reuse": "leave it out: what prompts have in common from the start on is always reused, and KV is never moved to another"
    " place in a prompt",
    "--slots": "leave it out: GET /v1/queue, who waits and who runs, is always there",
    "--tokenizer": "it is not there yet: the tokenizer is the model's own",
    "--guided-decoding-disable-fallback": "leave it out: a --grammar-backend that is named has no fallback",
    "--jinja": "leave it out: chat templates are always read",
    "--disable-uvicorn-access-log": "leave it out: HTTP requests are logged with --verbose only",
    "--uvicorn-log-level": "use --verbose to have HTTP requests logged",
    "--disable-log-stats": "leave it out: there is one line every ten seconds, and only while the engine is busy",
    "--metrics": _MEASURED,
    "--enable-metrics": _MEASURED,
    "--enable-reasoning": "leave it out: see --reasoning-parser",
    "--reasoning-format": "leave it out: see --reasoning-parser",
    "--grammar": _OF_REQUESTS,
    "--grammar-file": _OF_REQUESTS,
    "--json-schema": _OF_REQUESTS,
    "-j": _OF_REQUESTS,
    "--constrained-json-disable-any-whitespace": "requests say so themselves: compact_json",
    "--constrained-json-whitespace-pattern": "whitespace in JSON is at most two characters; requests may ask for none: compact_json",
    "--trust-remote-code": "leave it out: code that comes with a checkpoint is never run",
    "--max-logprobs": "leave it out: a request may ask for up to 20 alternatives by top_logprobs",
    "--chat-template-content-format": "leave it out: lists of text parts are made one text",
    "--task": _ANY_TASK,
    "--runner": _ANY_TASK,
    "--embeddings": _ANY_TASK,
    "--embedding": _ANY_TASK,
    "--log-level": "use --verbose to have HTTP requests logged, or --no-enable-log-requests to have less in the log",
    "--flash-attn": "leave it out: attention kernels are chosen by the device",
    "-fa": "leave it out: attention kernels are chosen by the device",
    "--allowed-origins": _CORS,
    "--allowed-methods": _CORS,
    "--allowed-headers": _CORS,
    "--hf-token": _SECRET,
    "--ssl-keyfile": _OF_A_PROXY,
    "--ssl-certfile": _OF_A_PROXY,
    "--ssl-key-file": _OF_A_PROXY,
    "--ssl-cert-file": _OF_A_PROXY,
    "--root-path": _OF_A_PROXY,
    "--fastapi-root-path": _OF_A_PROXY,
    "--api-prefix": _OF_A_PROXY,
}


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every default; where it is no plain value, the help text itself says what happens. Indented lines stay as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            indent + part if part.startswith(" ") or not part else super(Help, self)._fill_text(part, width, indent)
            for part in text.split("\n")
        )


class Parser(argparse.ArgumentParser):
    """Takes no abbreviated flags, since tomorrow's flag would change what they mean; suggests the nearest one instead.

    knows_others    an unknown flag may be one of another server's, and is explained
    """

    def __init__(self, *, knows_others: bool = False, formatter_class: Any = Help, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=formatter_class, **settings)
        self._knows_others = knows_others
        self._blamed = ""  # where what is parsed comes from, if not from the command line
        self.register("type", int, _integer)
        self.register("type", float, _number)

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """As `parse_args`, but an unknown flag is reported by the command it was given to."""
        args, unknown = self.parse_known_args(arguments)
        command: Parser = getattr(args, "parser", self)
        if take_rest := getattr(args, "take_rest", None):
            take_rest(args, unknown)
        elif unknown:
            command.error(command.describe_unknown(unknown))
        return args

    def describe_unknown(self, unknown: Sequence[str]) -> str:
        """E.g. "unknown argument --max-num-seq; did you mean --max-num-seqs?"."""
        flags = [word for word in unknown if word.startswith("-")]  # the others may be the values of these
        name = (flags or unknown)[0].split("=")[0]
        return f"unknown argument {name}; {self.hint(name)}"

    def hint(self, flag: str) -> str:
        """What to do instead of a flag that there is not."""
        if self._knows_others and flag in NAMES_HERE:
            return f"here it is {NAMES_HERE[flag]}"
        if self._knows_others and flag in NOT_HERE:
            return NOT_HERE[flag]
        near = nearest(flag, self._option_string_actions)
        return f"did you mean {near}?" if near else f"see {self.prog} --help"

    @contextmanager
    def blaming(self, where: str) -> Iterator[None]:
        """Errors meanwhile begin with where the value comes from."""
        self._blamed = where
        yield
        self._blamed = ""

    def error(self, message: str) -> NoReturn:
        """One sentence, without the usage, which --help prints."""
        told = re.match("argument (?P<flag>[^:]+): (?P<what>.*)", message, flags=re.DOTALL)
        if told:  # argparse's "argument --port: …"
            flag, what = told["flag"].split("/")[0], told["what"]  # of several names the first
            message = f"{flag} {what}" if what.startswith("is ") else f"{flag}: {what}"
        where = f"{self._blamed}: " if self._blamed else ""
        self.exit(2, f"{self.prog}: error: {where}{message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            near = difflib.get_close_matches(str(value), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
            raise argparse.ArgumentError(action, f"is {shown(value)}; {hint}")
        raise argparse.ArgumentError(action, f"is {shown(value)}; allowed is one of {', '.join(names)}.")


def add_command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    purpose: str,
    run: Callable[[argparse.Namespace], int],
    *,
    about: str = "",
    examples: Sequence[str] = (),
    more: str = "",
    make: type[Parser] = Parser,
    **settings: Any,
) -> Any:
    """A command, and its help.

    purpose   one line, without a full stop
    about     further sentences, below the purpose
    examples  command lines without "trunkline", maybe with a comment
    more      where to read on
    make      the class of parser that it gets
    """
    epilog = "".join(["examples:", *(f"\n  trunkline {example}" for example in examples)]) if examples else ""
    epilog += f"\n\n{more}" if epilog and more else more
    kind = commands._parser_class
    commands._parser_class = make
    try:
        command = commands.add_parser(
            name,
            help=purpose,
            description=f"{purpose[0].upper()}{purpose[1:]}. {about}".strip(),
            epilog=epilog,
            **settings,
        )
    finally:
        commands._parser_class = kind
    command.set_defaults(run=run, parser=command, verbose=False)
    return command


def add_group(commands: "argparse._SubParsersAction[Parser]", name: str, purpose: str, **words: Any) -> Any:
    """A command that needs another word; alone it prints what there is. Returns where to add those words."""
    command = add_command(commands, name, purpose, print_help, **words)
    return command.add_subparsers(metavar="what", parser_class=Parser)


def add_url(parser: argparse.ArgumentParser, *, what: str = "the server, with or without /v1", **words: Any) -> None:
    """--url, also called --base-url, as `args.url`: DEFAULT_URL if it is not given."""
    parser.add_argument(
        "--url", "--base-url", type=address, metavar="URL", **{"default": DEFAULT_URL, "help": what} | words
    )


def print_help(args: argparse.Namespace) -> int:
    """A command that needs another word prints what there is."""
    args.parser.print_help()
    return 0


def nearest(name: str, names: Any) -> str | None:
    """The name that somebody who wrote `name` most likely meant."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=ALIKE)
    return near[0] if near else None


def size(text: str) -> int:
    """Type of a flag: bytes, "2GiB"."""
    return _read(parse_bytes, text)


def token_count(text: str) -> int:
    """Type of a flag: an integer, which may be written "32k" or "32K"."""
    return _read(parse_count, text)


def count(text: str) -> int:
    """Type of a flag: an integer of at least 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"is {shown(text)}; allowed is an integer of at least 0.")
    return int(text)


def positive(text: str) -> int:
    """Type of a flag: an integer of at least 1."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {shown(text)}; allowed is an integer of at least 1.")
    return int(text)


def _read(parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {shown(text)}; allowed is an integer, such as 4096.") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {shown(text)}; allowed is a number, such as 0.5.") from None

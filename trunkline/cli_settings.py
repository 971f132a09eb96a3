"""Where the settings of a command come from: its flags, else the environment, else a file (--config), else the defaults.

    --max-model-len 4096                on the command line
    TRUNKLINE_MAX_MODEL_LEN=4096        in the environment; an empty value counts as none
    max-model-len: 4096                 in the file, which is YAML

Each is read by the parser of the command itself, so a value means the same wherever it stands. Knows no flag by name but --config.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from trunkline.cli_parser import Parser, nearest
from trunkline.config import API_KEY_VARIABLE
from trunkline.errors import ConfigError, shown, without_passwords

PREFIX = "TRUNKLINE_"
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
ONE_KEY = (API_KEY_VARIABLE,)  # lists elsewhere; `chat` and others read it, too, as the key that they send
SECRET = ("--api-key", "--admin-api-key")
COMPLETING = "_ARGCOMPLETE"  # in the environment while a shell asks how a word may go on
_ABSENT: Any = object()


class Given(NamedTuple):
    """One setting, as somebody has written it.

    flag    e.g. "--max-model-len"
    values  as they would stand behind it; None: it is a switch, and `is_on`
    where   for people: "$TRUNKLINE_MAX_MODEL_LEN", "server.yaml, line 3"
    """

    flag: str
    values: tuple[str, ...] | None
    is_on: bool
    where: str


class LayeredParser(Parser):
    """The parser of a command whose settings may come from the environment and from a file, too.

    What it returns has `origins`, too: dest -> where its value comes from; those left out have their defaults.

    names_model  what stands alone among the flags is the model, as after --model
    """

    names_model = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if COMPLETING in os.environ:  # a shell asks how a word may go on: nothing is set
            return super().parse_known_args(args, namespace)
        typed, unknown = self._read(sys.argv[1:] if args is None else list(args))
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        environment = self._in_environment(os.environ, typed)
        file = typed.get("config") or next((given.values[0] for given in environment if given.flag == "--config"), None)  # type: ignore[index]
        for given in (*(self._in_file(file) if file else ()), *environment):
            with self.blaming(given.where):
                read = self._read_given(given)
            for dest, value in read.items():
                values[dest], origins[dest] = value, given.where
        if typed.get("model") is not None and self.names_model:  # MODEL is what the flag --model says elsewhere
            values.pop("model_flag", None)
            origins.pop("model_flag", None)
        values |= typed
        origins |= dict.fromkeys(typed, "flag")
        full, _ = super().parse_known_args([], namespace)
        for dest, value in values.items():
            setattr(full, dest, value)
        full.origins = origins
        return full, unknown

    def _read(self, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
        """What these arguments set, by dest; and what could not be understood."""
        blank = argparse.Namespace()
        for action in self._actions:  # what adds to a list begins with none
            setattr(blank, action.dest, None if isinstance(action, argparse._AppendAction) else _ABSENT)
        read, unknown = super().parse_known_args(arguments, blank)
        dests = {action.dest for action in self._actions}
        return {
            dest: value for dest, value in vars(read).items() if dest in dests and value not in (None, _ABSENT)
        }, unknown

    # ---------------------------------------------------------------- environment

    def _in_environment(self, environment: Mapping[str, str], typed: Mapping[str, Any]) -> list[Given]:
        """Without what is typed, too: a variable that does not count may hold anything."""
        found = []
        for action in self.settings():
            if action.dest in typed:
                continue
            name = variable(action)
            if text := environment.get(name, ""):
                found.append(self._given(action, long_flag(action), text, f"${name}"))
        return found

    def _given(self, action: argparse.Action, flag: str, text: str, where: str) -> Given:
        if action.nargs == 0:
            with self.blaming(where):
                return Given(flag, None, self._switch(flag, text), where)
        is_list = action.nargs == "+" and where.removeprefix("$") not in ONE_KEY
        return Given(flag, tuple(text.split(",")) if is_list else (text,), True, where)

    def _switch(self, name: str, text: str) -> bool:
        if text.lower() not in (*YES, *NO):
            self.error(f"{name} is {shown(text)}; allowed is true or false.")
        return text.lower() in YES

    # ---------------------------------------------------------------- file

    def _in_file(self, path: str) -> Iterator[Given]:
        name = os.path.basename(path)
        seen: dict[str, tuple[str, int]] = {}  # dest -> its key, which may be spelt in several ways, and its line
        for key, node, line in _entries(path):
            where = f"{name}, line {line}"
            with self.blaming(where):
                flag, action = self._named(key)
                if action not in self.settings() or flag == "--config":
                    self.error(f"{key} cannot be set in a file; leave it out, and give {flag} on the command line.")
                if action.dest in seen:
                    other, at = seen[action.dest]
                    alias = "" if other == key else f" as {other}"
                    raise ConfigError(f"{where}: {key} stands in line {at} already{alias}; keep one of them.")
                seen[action.dest] = key, line
                if (given := self._in_node(action, flag, key, node, where)) is not None:
                    yield given

    def _named(self, key: str) -> tuple[str, argparse.Action]:
        """The flag that a key stands for."""
        flag = "--" + key.replace("_", "-").removeprefix("--")
        action = self._option_string_actions.get(flag)
        if action is None:
            self.error(f"unknown key {key}; {self._key_hint(flag)}")
        return flag, action

    def _key_hint(self, flag: str) -> str:
        return self.hint(flag).replace("--", "") if nearest(flag, self._option_string_actions) else self.hint(flag)

    def _in_node(self, action: argparse.Action, flag: str, key: str, node: Any, where: str) -> Given | None:
        """None for a key without a value, which is as if it were left out."""
        if node.tag == "tag:yaml.org,2002:null":
            return None
        if action.nargs == 0:
            text = node.value if node.id == "scalar" else f"a {node.id}"
            return Given(flag, None, self._switch(key, text), where)
        if node.id == "scalar":
            return Given(flag, (node.value,), True, where)
        if node.id == "sequence" and action.nargs == "+" and all(item.id == "scalar" for item in node.value):
            return Given(flag, tuple(item.value for item in node.value), True, where) if node.value else None
        self.error(f"{key} is a {node.id}; allowed is {'a list of values' if action.nargs == '+' else 'one value'}.")

    # ---------------------------------------------------------------- all of them

    def read_setting(self, key: str, text: str, where: str) -> tuple[str, Any]:
        """Dest and value of a setting that stands somewhere else, as a key and its value: "kv-cache-memory", "2GiB"."""
        with self.blaming(where):
            flag, action = self._named(key)
        given = self._given(action, flag, text, where)
        with self.blaming(where):
            return action.dest, self._read_given(given).get(action.dest, action.default)

    def settings(self) -> list[argparse.Action]:
        """All flags that are settings: not --help, nor what only says what to do now."""
        return [
            action
            for action in self._actions
            if action.option_strings and not isinstance(action, argparse._HelpAction | ShowConfig)
        ]

    def _read_given(self, given: Given) -> dict[str, Any]:
        """What the setting sets, by dest. Each value of a list is read by itself, behind "=", for it may begin with "-"."""
        if given.values is None:
            return self._read(self._switch_as_arguments(given))[0]
        first, *others = (self._read([f"{given.flag}={value}"])[0] for value in given.values)
        for other in others:
            for dest, values in other.items():
                first[dest] = first[dest] + values
        return first

    def _switch_as_arguments(self, given: Given) -> list[str]:
        """As it would stand on the command line. One that is off stands there only if it has a flag for that."""
        flag = given.flag
        if given.is_on:
            return [flag]
        opposite = flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
        return [opposite] if opposite in self._option_string_actions else []


class ShowConfig(argparse._StoreTrueAction):
    """--show-config: what to do, not a setting."""


def add_settings_flags(group: argparse._ArgumentGroup) -> None:
    """The flags of a command with a LayeredParser."""
    group.add_argument(
        "--config",
        metavar="FILE",
        help="settings as YAML, a flag's name and its value on each line. Flags and the environment count more",
    )
    group.add_argument(
        "--show-config",
        action=ShowConfig,
        help="print each setting and where it comes from, as such a file, and leave",
    )


def long_flag(action: argparse.Action) -> str:
    """The name under which a flag is known: its first long one."""
    return next(name for name in action.option_strings if name.startswith("--"))


def variable(action: argparse.Action) -> str:
    """The flag's name in the environment."""
    return PREFIX + long_flag(action)[2:].replace("-", "_").replace(".", "_").upper()


def misspelt_variables(parser: LayeredParser, environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like one of a setting, and is none."""
    known = [variable(action).removeprefix(PREFIX) for action in parser.settings()]
    words = [name.removeprefix(PREFIX) for name in sorted(environment) if name.startswith(PREFIX)]
    return [
        f"${PREFIX}{word} is no setting, and is ignored; did you mean ${PREFIX}{near}?"
        for word in words
        if word not in known and (near := nearest(word, known))
    ]


def show_settings(args: argparse.Namespace) -> str:
    """Every setting with its origin, in a form that --config reads: a setting without a value is a comment. Keys and passwords are left out."""
    parser: LayeredParser = args.parser
    rows = []
    for action in parser.settings():
        flag, value = long_flag(action), getattr(args, action.dest)
        if flag == "--config":
            continue
        if action.dest == "model_flag":
            value = args.model if args.model is not None else value
        origin = args.origins.get("model" if action.dest == "model_flag" and args.model else action.dest, "default")
        line = f"{flag[2:]}: {'…' if flag in SECRET and value else without_passwords(_yaml(value))}"
        rows.append((f"# {flag[2:]}:" if value is None or value == [] else line, origin))
    width = max(len(line) for line, _ in rows)
    return "\n".join(f"{line.ljust(width)}  # {origin}" for line, origin in rows)


def _yaml(value: Any) -> str:
    """A value in YAML, on one line."""
    import yaml

    text: str = (
        yaml.safe_dump(value, default_flow_style=True, width=2**20, allow_unicode=True).removesuffix("...\n").strip()
    )
    return text


def _entries(path: str) -> list[tuple[str, Any, int]]:
    """Key, YAML node and line of each entry. Raises ConfigError for what is no file of settings."""
    import yaml

    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            root: Any = yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--config is {path!r}, which cannot be read: {reason}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: {getattr(error, 'problem', None) or error}; this is not YAML.") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply; write one setting on each line.") from None
    if root is None:
        return []
    if root.id != "mapping":
        raise ConfigError(f"{name} holds no settings; write one on each line, such as max-model-len: 4096.")
    entries = []
    for key, node in root.value:
        line = key.start_mark.line + 1
        if key.id != "scalar":
            raise ConfigError(
                f"{name}, line {line}: a key is a {key.id}; allowed is a flag's name, such as max-model-len."
            )
        entries.append((key.value, node, line))
    return entries

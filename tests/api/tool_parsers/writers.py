"""Calls as models of each dialect write them: what the parsers are compared with. No code of theirs is used here."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Arguments = Mapping[str, Any]
Writer = Callable[[Sequence[tuple[str, Arguments]]], str]


class Notation(NamedTuple):
    """write: of calls. never: texts that no argument can hold, since nothing escapes them there."""

    write: Writer
    never: tuple[str, ...] = ()


def _each(write: Callable[[str, Arguments], str], *, opening: str = "", between: str = "", closing: str = "") -> Writer:
    def write_all(calls: Sequence[tuple[str, Arguments]]) -> str:
        return opening + between.join(write(name, arguments) for name, arguments in calls) + closing

    return write_all


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return dumps({"name": name, key: arguments})


def _python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _tagged(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _dsml(name: str, arguments: Arguments) -> str:
    lines = [
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{_tagged(value)}'
        "</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n'


def _qwen(name: str, arguments: Arguments) -> str:
    lines = [f"<parameter={key}>\n{_tagged(value)}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def _glm(name: str, arguments: Arguments) -> str:
    lines = [f"<arg_key>{key}</arg_key>\n<arg_value>{_tagged(value)}</arg_value>\n" for key, value in arguments.items()]
    return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


def _gemma(value: Any, quote: str, quoted_keys: bool) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            mark = quote if quoted_keys else ""
            return "{" + ",".join(f"{mark}{k}{mark}:{_gemma(v, quote, quoted_keys)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(_gemma(item, quote, quoted_keys) for item in value) + "]"
    return dumps(value)


GEMMA_QUOTE = '<|"|>'
DEEPSEEK = {"opening": "<｜tool▁calls▁begin｜>", "closing": "<｜tool▁calls▁end｜>"}
NOTATIONS: dict[str, Notation] = {
    "hermes": Notation(_each(lambda n, a: f"<tool_call>\n{_call(n, a)}\n</tool_call>", between="\n")),
    "smollm": Notation(_each(_call, opening="<tool_call>[", between=", ", closing="]</tool_call>")),
    "json": Notation(_each(_call, opening="[", between=", ", closing="]")),
    "llama3_json": Notation(_each(lambda n, a: _call(n, a, "parameters"), between="; ")),
    "mistral": Notation(_each(_call, opening="[TOOL_CALLS] [", between=", ", closing="]")),
    "mistral_v11": Notation(_each(lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}")),
    "deepseek_v3": Notation(
        _each(
            lambda n, a: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>",
            between="\n",
            **DEEPSEEK,
        )
    ),
    "deepseek_v31": Notation(
        _each(lambda n, a: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>", **DEEPSEEK)
    ),
    "openai": Notation(
        _each(
            lambda n, a: f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>",
            between="<|start|>assistant",
        )
    ),
    "kimi_k2": Notation(
        _each(
            lambda n, a: f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>",
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
        )
    ),
    "pythonic": Notation(_each(_python, opening="[", between=", ", closing="]")),
    "smollm3_python": Notation(_each(_python, opening="<code>\n", between="\n", closing="\n</code>")),
    "deepseek_v32": Notation(
        _each(_dsml, opening="\n\n<｜DSML｜function_calls>\n", closing="</｜DSML｜function_calls>"),
        ("</｜DSML｜parameter>",),
    ),
    "qwen3_coder": Notation(_each(_qwen, between="\n"), ("</parameter>",)),
    "glm45": Notation(_each(_glm, between="\n"), ("</arg_value>",)),
    "functiongemma": Notation(
        _each(lambda n, a: f"<start_function_call>call:{n}{_gemma(a, '<escape>', False)}<end_function_call>"),
        ("<escape>",),
    ),
    "gemma4": Notation(
        _each(lambda n, a: f"<|tool_call>call:{n}{_gemma(a, GEMMA_QUOTE, True)}<tool_call|>"),
        (GEMMA_QUOTE,),
    ),
}

"""Chat templates: what Hugging Face renders, what the sandbox forbids, and where renderings end."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from trunkline.api.template import MAX_PROMPT_CHARACTERS, ChatTemplate, normalize_messages
from trunkline.errors import GenerationFailed, InvalidParameter, StartupError
from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import load_tokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# The shapes that the families' templates have, written for this test.
LLAMA3_LIKE = """{{- bos_token }}
{%- set ns = namespace(date=strftime_now('%d %b %Y')) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|system|>' + ns.date + '\\n' + system }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

MISTRAL_LIKE = """{{ bos_token }}{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/…') }}
{% endif %}
{% if loop.index > 20 %}{% break %}{% endif %}
{% if message.role == 'user' %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}
{% else %}{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}{% endif %}
{% endfor %}"""

QWEN_LIKE = """{%- macro tag(name, text) %}{{ '<' ~ name ~ '>' ~ text ~ '</' ~ name ~ '>' }}{% endmacro %}
{%- set last = namespace(user=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and last.user < 0 %}{% set last.user = messages | length - 1 - loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 < last.user and message.role == 'assistant' %}
        {{- tag('old', message.content.split('</think>')[-1].lstrip('\\n')) }}
    {%- else %}
        {{- tag(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if documents %}{% for document in documents %}{{ tag('document', document.text | upper) }}{% endfor %}{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ tag('think', '') }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3_LIKE, "mistral": MISTRAL_LIKE, "qwen": QWEN_LIKE}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a < b & é", "parameters": {"type": "object", "properties": {}}},
}
CHATS = {
    "one": [{"role": "user", "content": " Hi there <b> & 'you' "}],
    "system": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>hm</think>\n\nHello"},
        {"role": "user", "content": "Why? é 日本"},
    ],
    "calls": [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "id": "call_1", "function": {"name": "add", "arguments": {"é": [1, None]}}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ],
}


def render(source: str, messages=({"role": "user", "content": "Hi"},), **options) -> str:
    return ChatTemplate(source, special_tokens=SPECIAL_TOKENS).render(messages, **options)


# ── what Hugging Face renders ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chat", "options"),
    [
        (name, chat, options)
        for name, template in TEMPLATES.items()
        for chat in CHATS
        for options in ({}, {"tools": [TOOL]}, {"documents": [{"text": "é"}]})
        if "tools" in template or not (chat == "calls" or "tools" in options)  # else we tell tools in words
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_agrees_with_transformers(name, chat, options, add_generation_prompt):
    ours = outcome(lambda: render(TEMPLATES[name], CHATS[chat], add_generation_prompt=add_generation_prompt, **options))
    theirs = outcome(lambda: hugging_face(TEMPLATES[name], CHATS[chat], add_generation_prompt, **options))
    assert ours == theirs
    assert ours is not None or name in ("mistral", "llama3")  # those that refuse some chats


@pytest.mark.slow
@pytest.mark.parametrize("text", ["The answer is", "  The answer is ", "The answer is\n\n", "<think>hm</think>so"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_continuing_a_message_agrees_with_transformers(name, text):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    ours = render(TEMPLATES[name], chat, add_generation_prompt=False, continue_final_message=True)
    assert ours == hugging_face(TEMPLATES[name], chat, False, continue_final_message=True)


def outcome(function) -> str | None:
    """What it returns; None if it raises because the template refuses the messages."""
    from jinja2 import TemplateError

    try:
        return function()
    except (InvalidParameter, TemplateError):
        return None


def hugging_face(source: str, messages, add_generation_prompt: bool, **options) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, **SPECIAL_TOKENS)
    return tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt, **options
    )


def test_chatml():
    assert render(CHATML, CHATS["system"]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_tools_are_written_as_json_that_no_html_filter_has_seen():
    prompt = render(LLAMA3_LIKE, tools=[TOOL])
    assert json.dumps(TOOL, indent=4, ensure_ascii=False) in prompt
    assert "a < b & é" in prompt


def test_blocks_take_their_line_with_them():
    assert render("{% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


def test_the_clock_is_the_callers():
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", special_tokens={}, now=lambda: datetime(2026, 11, 29))
    assert template.render(CHATS["one"]) == "29 November 2026"


def test_further_variables():
    assert render(QWEN_LIKE, chat_template_kwargs={"enable_thinking": False}).endswith("<think></think>")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "chat_template"]
)
def test_variables_of_the_server_cannot_be_set(name):
    with pytest.raises(InvalidParameter, match=f"sets '{name}'") as error:
        render(CHATML, chat_template_kwargs={name: "x"})
    assert error.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("given", [[1], "enable_thinking", 5])
def test_variables_are_an_object(given):
    with pytest.raises(InvalidParameter, match="an object of names and values"):
        render(CHATML, chat_template_kwargs=given)


def test_empty_lists_of_tools_and_documents_are_none():
    assert render("{{ tools }} {{ documents }}", tools=[], documents=[]) == "None None"


def test_threads_may_share_a_template():
    template = ChatTemplate(CHATML, special_tokens={})
    with ThreadPoolExecutor(8) as pool:
        prompts = list(pool.map(lambda n: template.render([{"role": "user", "content": f"{n}"}] * n), range(1, 60)))
    assert prompts == [template.render([{"role": "user", "content": f"{n}"}] * n) for n in range(1, 60)]


@pytest.mark.real
def test_the_builtin_models_template():
    tokenizer = load_tokenizer(builtin_model())
    prompt = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens).render(CHATS["system"])
    assert prompt == render(CHATML, CHATS["system"])
    assert tokenizer.encode(prompt)[:2] == [1, 9690]  # <|im_start|>system


# ── the last message goes on ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (CHATML, " The ", "<|im_start|>assistant\n The "),
        (CHATML.replace("message.content", "message.content | trim"), " The ", "<|im_start|>assistant\nThe"),
        (CHATML, "", "<|im_start|>assistant\n"),
    ],
)
def test_continue_final_message(source, text, expected):
    chat = [{"role": "user", "content": text or "Hi"}, {"role": "assistant", "content": text}]
    assert render(source, chat, add_generation_prompt=False, continue_final_message=True).endswith(expected)


def test_continue_final_message_and_generation_prompt_exclude_each_other():
    with pytest.raises(InvalidParameter, match="both true"):
        render(CHATML, continue_final_message=True)


def test_continue_final_message_needs_the_message_in_the_prompt():
    with pytest.raises(InvalidParameter, match="leaves out or rewrites the last message"):
        render("{{ messages | length }}", add_generation_prompt=False, continue_final_message=True)


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("message", "normal"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "assistant", "content": None, "refusal": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "name": "Ann", "content": "a\nb"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
    ],
)
def test_normal_form(message, normal):
    assert normalize_messages([message]) == [normal]


@pytest.mark.parametrize("calls", [5, "call", {"function": {}}])
def test_tool_calls_are_a_list(calls):
    with pytest.raises(InvalidParameter, match="a list of calls") as error:
        normalize_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert error.value.param == "messages[0].tool_calls"


@pytest.mark.parametrize(
    ("arguments", "normal"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("[" * 99_999, "[" * 99_999),
    ],
)
def test_arguments_of_tool_calls_become_objects(arguments, normal):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (result,) = normalize_messages([message])
    assert result["tool_calls"] == [call | {"function": {"name": "add", "arguments": normal}}]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments  # the caller's own is untouched


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ([{"role": "user", "content": "a"}, "b"], r"messages\[1\]"),
        ([{"content": "a"}], r"messages\[0\]"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\].content\[0\]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\].content\[0\]",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"messages\[0\].content\[0\]"),
    ],
)
def test_messages_that_are_refused(messages, where):
    with pytest.raises(InvalidParameter, match=f"^'{where}' is "):
        render(CHATML, messages)


# ── bounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "''['__class__'].mro()",
        "'' | attr('__class__') | attr('__subclasses__')()",
        "raise_exception.__globals__['json']",
        "strftime_now.__code__.co_consts",
        "messages.append(1)",
        "messages[0].update(role='x')",
        "messages[0].pop('role')",
        "namespace(__class__=1)",
        "namespace.__init__.__globals__['json']",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "self.__init__.__globals__.__builtins__",
        "'{0.__class__.__mro__}'.format(1)",
        "('{0.__class__}' | string).format(messages)",
        "dict.__subclasses__()",
        "lipsum.__globals__",
        "messages.__class__.__base__.__subclasses__()",
    ],
)
def test_nothing_leads_out_of_the_sandbox(expression):
    """Either it is forbidden, or it finds nothing there."""
    try:
        assert render("{{ " + expression + " }}") in ("", "{0.__class__}")
    except (GenerationFailed, InvalidParameter) as error:
        assert "not allowed" in error.message or "undefined" in error.message or "has no attribute" in error.message


def test_a_template_cannot_change_the_callers_messages():
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(GenerationFailed, match="'append' of 'list' object is unsafe"):
        render("{{ messages.append(1) }}", messages)
    with pytest.raises(GenerationFailed, match="'__html__' starts with an underscore"):
        render("{% set ns = namespace() %}{% set ns.__html__ = 1 %}", messages)
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% set r = 'x' * 9999 %}{% for a in r if a %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for a in 'abc' recursive %}{% if loop.depth == 1 %}{{ loop(r) }}{% endif %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    ],
    ids=["nested", "text", "recursive", "macro"],
)
def test_loops_and_calls_are_bounded(source, monkeypatch):
    monkeypatch.setattr("trunkline.api.template.MAX_STEPS", 20_000)
    with pytest.raises(InvalidParameter, match="took more than 20000 steps"):
        render(source)


def test_output_is_bounded():
    piece = MAX_PROMPT_CHARACTERS // 8
    source = "{% for a in range(N) %}{{ text }}{% endfor %}"
    assert len(render(source.replace("N", "8"), chat_template_kwargs={"text": "x" * piece})) == MAX_PROMPT_CHARACTERS
    with pytest.raises(InvalidParameter, match=f"more than {MAX_PROMPT_CHARACTERS} characters"):
        render(source.replace("N", "9"), chat_template_kwargs={"text": "x" * piece})


def test_counted_loops_know_their_length_and_neighbours():
    source = "{% for x in 'abc' %}{{ loop.previtem }}{{ x }}{{ loop.revindex }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
    assert render(source) == "a3/3,ab2/3,bc1/3"


# ── templates and messages that do not go together ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "line 1: Expected an expression"),
        ("a\n{{ x | nothing }}", "line 2: No filter named 'nothing'"),
        ("{% generation %}", "line 1: Unexpected end of template"),
        ("{% if a %}" * 400 + "{% endif %}" * 400, "nested too deeply"),
        ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "nested too deeply"),
    ],
)
def test_a_template_that_does_not_compile(source, message):
    with pytest.raises(StartupError, match=message):
        ChatTemplate(source, special_tokens={})


def test_the_templates_own_refusal_is_passed_on():
    with pytest.raises(InvalidParameter, match="refuses these messages: roles must alternate") as error:
        render(MISTRAL_LIKE, [*CHATS["one"], *CHATS["one"]])
    assert (error.value.status, error.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "expression", ["messages[0].parts[1].x", "1 + messages[0].content", "messages[0].content | int / 0"]
)
def test_messages_that_the_template_cannot_render(expression):
    with pytest.raises(InvalidParameter, match="cannot render these messages: ") as error:
        render("{{ " + expression + " }}")
    assert (error.value.status, error.value.param) == (400, "messages")

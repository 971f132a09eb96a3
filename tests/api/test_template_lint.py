"""What the lint says about templates in the shapes that models have."""

import io
from functools import cache

import pytest
import sentencepiece

from tests.api.serving import Server
from tests.tiny import CHAT_TEMPLATE
from trunkline.api.template import ChatTemplate
from trunkline.api.template_lint import ANSWERS, QUESTIONS, REASONING, Findings, Part, lint
from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import Tokenizer, load_tokenizer
from trunkline.models.tokenizer_spm import ModelProto, SentencePieceTokenizer

KEEPS = "The chat template keeps the cache: each turn of a chat begins with the tokens of the one before."

LLAMA3_LIKE = """{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|system|>\\n\\nToday Date: ' + date + '\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}{{ '<|' + message.role + '|>\\n\\n' + message.content | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n\\n' }}{% endif %}"""

QWEN3_LIKE = """{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < last.user %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The generation prompt opens the reasoning itself.
R1_LIKE = QWEN3_LIKE.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")

EMPTY_THINKING = CHAT_TEMPLATE.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<no_think>\\n' }}")

MISTRAL_LIKE = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{% elif message.role == 'assistant' %}{{ SPACE + message.content + eos_token }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""

TOOLS_LAST = """{% for message in messages %}
{% if message.role == 'user' %}
{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
[INST]{{ message.content }}[/INST]
{% else %}{{ message.content }}{% endif %}{% endfor %}"""

SYSTEM_LAST = """{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{% for message in messages %}
{% if message.role == 'user' %}[INST]{{ system + ' ' if loop.last and system else '' }}{{ message.content }}[/INST]
{% elif message.role == 'assistant' %}{{ message.content }}{% endif %}{% endfor %}"""

TIME_FIRST = "{{ strftime_now('%Y-%m-%d %H:%M') }}\n" + CHAT_TEMPLATE
TIME_LAST = CHAT_TEMPLATE.replace("{% if add", "It is {{ strftime_now('%H:%M:%S') }}.\n{% if add")
REMINDER_LAST = CHAT_TEMPLATE.replace("{% if add", "Remember to be brief.\n{% if add")
COUNTS_FIRST = "This chat has {{ messages | length }} messages.\n" + CHAT_TEMPLATE
NUMBERS_MESSAGES = CHAT_TEMPLATE.replace("message['content']", "message['content'] + (loop.revindex | string)")
TRIMS = CHAT_TEMPLATE.replace(
    "message['content']", "('  ' if message.role == 'assistant' else '') + message['content']"
)


def findings(source: str, tokenizer: Tokenizer) -> Findings:
    return lint(ChatTemplate(source, special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"}), tokenizer)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, CHAT_TEMPLATE + "{# tools #}"])
def test_chatml_keeps_the_cache(source: str, tokenizer: Tokenizer) -> None:
    assert findings(source, tokenizer) == Findings([], has_date=False)
    assert findings(source, tokenizer).sentence == KEEPS


def test_a_date_is_told_but_is_no_break(tokenizer: Tokenizer) -> None:
    found = findings(LLAMA3_LIKE, tokenizer)
    assert found == Findings([], has_date=True)
    assert found.sentence == f"{KEEPS} It holds the date: at midnight every prompt becomes a new one."


@pytest.mark.parametrize(
    ("source", "part", "case"),
    [
        (QWEN3_LIKE, Part.REASONING, "of reasoning models"),
        (R1_LIKE, Part.REASONING, "of reasoning models"),
        (EMPTY_THINKING, Part.GENERATION_PROMPT, ""),
        (TOOLS_LAST, Part.TOOLS, "with tools"),
        (SYSTEM_LAST, Part.SYSTEM, ""),
        (TIME_FIRST, Part.TIME, ""),
        (REMINDER_LAST, Part.AFTER_LAST, ""),
        (COUNTS_FIRST, Part.BEGINNING, ""),
        (TRIMS, Part.ANSWER, ""),
    ],
)
def test_the_part_that_breaks_it(source: str, part: Part, case: str, tokenizer: Tokenizer) -> None:
    first, *others = findings(source, tokenizer).breaks
    assert (first.part, first.case.words) == (part, case)
    assert others == []


@pytest.mark.parametrize(
    ("source", "parts"),
    [(TIME_LAST, [Part.TIME, Part.AFTER_LAST]), (NUMBERS_MESSAGES, [Part.MESSAGES, Part.AFTER_LAST])],
)
def test_each_part_is_told_once(source: str, parts: list[Part], tokenizer: Tokenizer) -> None:
    found = findings(source, tokenizer)
    assert [broken.part for broken in found.breaks] == parts
    assert not found.has_date, "the time says more"
    assert f"{parts[0].words}." in found.sentence
    assert f" And {found.breaks[1].case.words or 'also'}: {parts[1].words}. See " in found.sentence


def test_the_sentence(tokenizer: Tokenizer) -> None:
    sentence = findings(QWEN3_LIKE, tokenizer).sentence
    assert sentence.startswith(
        "The chat template breaks the cache of reasoning models: the reasoning, which it leaves out of earlier answers. Of "
    )
    assert (
        "then it has 'The air' where '<think' is cached. Every turn reads the last answer again. See docs/cache.md"
        in sentence
    )
    assert findings(QWEN3_LIKE, tokenizer).is_costly
    sentence = findings(SYSTEM_LAST + "{{ tools }}", tokenizer).sentence
    assert "breaks the cache: the system message, which moves on with the last message." in sentence


def test_numbers_and_texts_of_a_break(tokenizer: Tokenizer) -> None:
    (found,) = findings(EMPTY_THINKING, tokenizer).breaks
    template = ChatTemplate(EMPTY_THINKING, special_tokens={})
    prompt = template.render(
        [
            {"role": "system", "content": "You answer questions about the weather."},
            {"role": "user", "content": QUESTIONS[0]},
        ]
    )
    cached = tokenizer.encode(prompt + ANSWERS[0])
    assert found.num_cached == len(cached)
    assert tokenizer.decode(cached[: found.num_found], skip_special_tokens=False).endswith("assistant\n")
    assert (found.cached, found.rendered) == ("<no_t", "The air")


def test_a_template_that_refuses_a_chat_like_this(tokenizer: Tokenizer) -> None:
    found = findings("{{ raise_exception('no chats today') }}", tokenizer)
    assert found.breaks == []
    assert found.sentence.startswith("Whether the chat template keeps the cache can't be told: ")
    assert "no chats today" in found.sentence


@cache
def sentencepiece_tokenizer() -> SentencePieceTokenizer:
    """As of Llama 2 and the first Mistral: a space before each text, words known by the space before them."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*QUESTIONS, *ANSWERS, REASONING] * 9),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return SentencePieceTokenizer(
        ModelProto.FromString(model.getvalue()),
        added={},
        prefix_always=False,
        add_bos=True,
        add_eos=False,
        bos_token_id=1,
        eos_token_ids=(2,),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=None,
    )


@pytest.mark.parametrize(("space", "part"), [("''", None), ("' '", Part.ANSWER)])
def test_spaces_around_instructions(space: str, part: Part | None) -> None:
    """The model's own first token is a word with a space; a template that writes another makes it two."""
    tokenizer = sentencepiece_tokenizer()
    source = MISTRAL_LIKE.replace("SPACE", space)
    found = lint(ChatTemplate(source, special_tokens=tokenizer.special_tokens), tokenizer)
    assert [(b.part, b.case.words) for b in found.breaks] == ([(part, "without a system message")] if part else [])


@pytest.mark.real
def test_the_builtin_models_template() -> None:
    tokenizer = load_tokenizer(builtin_model())
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
    assert lint(template, tokenizer).sentence == KEEPS


@pytest.mark.real
def test_blanks_that_are_another_token_at_the_end_of_a_text() -> None:
    """As GPT-2's tokenizer has it: two newlines before a word are two tokens, and one at the end of a text."""
    tokenizer = load_tokenizer(builtin_model())
    (border,) = lint(ChatTemplate(LLAMA3_LIKE, special_tokens=tokenizer.special_tokens), tokenizer).breaks
    assert (border.part, border.cached, border.rendered) == (
        Part.BORDER,
        "\n\n|The| air| sc|atters",
        "\n|\n|The| air| sc",
    )
    template = ChatTemplate(CHAT_TEMPLATE.replace("'<|im_end|>'", "'[end]'"), special_tokens=tokenizer.special_tokens)
    end = lint(template, tokenizer).breaks[0]
    assert (end.part, end.cached, end.rendered[:1]) == (Part.END, ".", ".")
    assert not lint(template, tokenizer).is_costly


def test_the_server_says_so_once(server: Server) -> None:
    assert f"[api] {KEEPS}" in server.wait_for(r"\[api\] The chat template .*").group()
    assert server.output.count("The chat template") == 1

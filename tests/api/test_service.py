"""Where defaults come from: generation_config.json, templates, and the socket's folder."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from trunkline.api.engine_process import EngineProcess
from trunkline.api.prompt import render
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.response_format import GrammarDefaults
from trunkline.api.service import sampling_defaults
from trunkline.api.template import ChatTemplate
from trunkline.api.template_source import chat_template_source
from trunkline.config import engine_config
from trunkline.errors import ConfigError, InvalidParameter

CHECKPOINT = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True, "eos_token_id": 2, "max_length": 20}


def test_auto_takes_the_checkpoints_sampling_and_nothing_else() -> None:
    assert sampling_defaults("auto", CHECKPOINT) == {"temperature": 0.6, "top_p": 0.9}


def test_vllm_takes_nothing() -> None:
    assert sampling_defaults("vllm", CHECKPOINT) == {}


def test_folder_of_another(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 5}))
    assert sampling_defaults(str(tmp_path), CHECKPOINT) == {"top_k": 5}


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_folder_without_a_readable_one(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        sampling_defaults(str(tmp_path), {})


@pytest.mark.parametrize("bad", [{"temperature": 7}, {"top_p": "high"}, {"top_k": 1.5}])
def test_values_no_request_may_have_stop_the_start(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"generation-config vllm"):
        sampling_defaults("auto", bad)


def test_request_wins_over_defaults_even_with_zero() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9}
    request = CompletionRequest.parse({"model": "m", "prompt": "x", "temperature": 0, "top_p": None})
    sampling = request.sampling(defaults, GrammarDefaults())
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0, 0.9, 16)


def test_template_by_path_or_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert chat_template_source(str(file)) == chat_template_source("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match="--chat-template"):
        chat_template_source(str(tmp_path / "none.jinja"))


ONE_SYSTEM = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one only') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}",
    special_tokens={},
)


def chat(*messages: tuple[str, Any]) -> ChatRequest:
    return ChatRequest.parse({"model": "m", "messages": [{"role": role, "content": text} for role, text in messages]})


def test_system_messages_are_merged_only_if_the_template_wants_it() -> None:
    late = chat(("user", "u"), ("developer", "a"), ("system", "b"))
    assert render(ONE_SYSTEM, late) == "system:a\n\nb;user:u;"
    lenient = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", special_tokens={})
    assert render(lenient, late) == "user:u;system:a;system:b;"


def test_what_the_template_refuses_for_other_reasons_stays_refused() -> None:
    refuses = ChatTemplate("{{ raise_exception('never') }}", special_tokens={})
    with pytest.raises(InvalidParameter, match="never"):
        render(refuses, chat(("system", "a"), ("user", "u")))


async def test_socket_path_that_is_too_long_names_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="Set TMPDIR to a shorter folder"):
        EngineProcess(engine_config("m"))
    assert list(deep.iterdir()) == []

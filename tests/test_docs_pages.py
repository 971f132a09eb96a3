"""Pages that quote the server or list its flags and fields: what they say is what there is."""

import argparse
import logging
import re
from pathlib import Path

import pytest

from tests.documentation import ROOT, blocks
from tests.scheduler.factories import hold_up_texts
from tests.stub import make_ready
from trunkline.api import fields
from trunkline.api.advice import advise
from trunkline.api.messages_protocol import MessagesRequest
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.reference import document
from trunkline.api.responses_protocol import ResponsesRequest
from trunkline.cli import make_parser
from trunkline.cli_parser import NAMES_HERE, NOT_HERE
from trunkline.config import QUANTIZATIONS, CacheConfig, engine_config
from trunkline.errors import InvalidParameter
from trunkline.models.architectures import ARCHITECTURES
from trunkline.models.quantized_folder import METHODS
from trunkline.models.rope import GGUF_KINDS, HF_KINDS
from trunkline.workers.gpu_memory import Footprint, size_gpu_pool

DOCS = ROOT / "docs"
BODIES = (ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest)


def one_line(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------- pitfalls


def advice_of(num_tokens: int, quantization: str | None = None, **settings: object) -> list[str]:
    ready = make_ready(num_pages=num_tokens // 16)
    told = advise(engine_config("model", **settings), ready, quantization)  # type: ignore[arg-type]
    return [f"{logging.getLevelName(level)} [api] {sentence}" for level, sentence in told]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """As the log shows it, without the time: the process in brackets. Engine and worker are one."""
    processes = {"trunkline.api": "api", "trunkline.engine": "engine", "trunkline.worker": "engine"}
    return [f"{record.levelname} [{processes[record.name]}] {record.getMessage()}" for record in caplog.records]


def size_a_card() -> None:
    gib = 2**30
    size_gpu_pool(
        CacheConfig(),
        utilization=0.97,
        footprint=Footprint(140 * gib, 20 * gib, gib),
        page_bytes=2**20,
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=512,
        name="NVIDIA H200",
    )


def test_the_server_prints_what_the_pitfalls_quote(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="trunkline")
    monkeypatch.setattr(fields, "_warned_keys", set())
    page = DOCS / "pitfalls.md"
    quoted = [one_line(block.text) for block in blocks(page) if block.language == ""]
    printed = advice_of(12_288) + advice_of(65_536, enable_prefix_caching=False)
    printed += advice_of(65_536, kv_cache_dtype="fp8") + advice_of(65_536, quantization="Q4_1")
    size_a_card()
    hold_up_texts(0.6, max_num_batched_tokens=65)
    body = {"messages": [], "temprature": 0}
    fields.read_fields(ChatRequest, body)
    with pytest.raises(InvalidParameter) as refused:
        fields.refuse_unsupported({"use_beam_search": True}, ChatRequest.unsupported)
    printed += [*logged(caplog), str(refused.value)]
    assert [line for line in quoted if line not in printed] == []
    headings = re.findall(r"^## (\d)\. ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == list("123456"), "six, and each of them says what to do"
    assert page.read_text(encoding="utf-8").count("**Do:**") == 6


# ---------------------------------------------------------------- flags


def serve_flags() -> set[str]:
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    flags = {flag for action in commands.choices["serve"]._actions for flag in action.option_strings}
    return flags - {"-h", "--help"}


def rows(page: Path) -> list[list[str]]:
    """The cells of every table."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_tuning_has_every_flag_once_and_no_other() -> None:
    listed = [code for row in rows(DOCS / "tuning.md") for code in codes(row[0]) if code.startswith("-")]
    assert sorted(listed) == sorted(serve_flags())


def test_every_flag_that_migrating_names_exists_here() -> None:
    """In the last column ours; in the others, theirs: those that have another name here lead to it, as the parser's errors do."""
    page = DOCS / "migrating.md"
    ours = serve_flags()
    tables = [row for row in rows(page) if len(row) == 4]
    for *there, here in tables:
        named = {code.split()[0] for code in codes(here) if code.startswith("-")}
        assert named <= ours, here
        for flag in (code for cell in there for code in codes(cell) if code.startswith("-")):
            if flag in NAMES_HERE:
                assert NAMES_HERE[flag].split(",")[0].split()[0] in named, f"{flag} is {NAMES_HERE[flag]}, not {here}"
            else:
                assert flag in ours or flag in NOT_HERE, f"nobody is told what {flag} is here"
    introduction = page.read_text(encoding="utf-8").split("## Flags")[1].split("\n|")[0]
    assert len(codes(introduction)) > 10 and set(codes(introduction)) <= ours


def test_every_field_and_route_that_migrating_names_exists_here() -> None:
    fields_here = {name for body in BODIES for name in (*body.model_fields, *body.unsupported)}
    routes = set(document()["paths"])
    section = ""
    checked = 0
    for line in (DOCS / "migrating.md").read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 4 or section == "Flags":
            continue
        named = codes(cells[0]) if cells[3] == "the same" else codes(cells[3])
        for code in named:
            path = re.fullmatch(r"(?:(?:GET|POST) )?(/.*)", code)
            if section == "Routes" and path:
                assert path[1] in routes, line
                checked += 1
            elif section == "Fields of a request" and re.fullmatch(r"\w+", code):
                assert code in fields_here, line
                checked += 1
    assert checked > 30


# ---------------------------------------------------------------- the index


def test_the_index_links_every_page() -> None:
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert len(linked) == len(set(linked)), "a page is listed once"
    assert pages - set(linked) == set()


# ---------------------------------------------------------------- models


def test_the_page_of_models_has_every_architecture() -> None:
    rows = re.findall(
        r"^\| `(\w+ForCausalLM)` \| `(\w+)` \| (?:`(\w+)`)? ?\|", (DOCS / "models.md").read_text(), re.MULTILINE
    )
    assert rows == [(a.hf, a.bare, a.gguf) for a in ARCHITECTURES.values()]


def test_the_page_of_models_has_every_rope() -> None:
    section = (DOCS / "models.md").read_text().split("## Longer contexts")[1].split("\n## ")[0]
    ropes = {name: word != "no" for name, word in re.findall(r"^\| `(\w+)` \|[^|]*\| (\w+)", section, re.MULTILINE)}
    del ropes["rope_type"]
    assert set(ropes) == set(HF_KINDS)
    assert (
        {name for name in ropes if not ropes[name]} == {"dynamic"} == set(HF_KINDS) - {"default", "llama3", *GGUF_KINDS}
    )


def test_the_page_of_models_has_every_method_of_quantization() -> None:
    section = (DOCS / "models.md").read_text().split("## Quantized checkpoints")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == ["gguf", *METHODS]
    assert {"auto", "none", "gguf", "int8", *METHODS} == set(QUANTIZATIONS)

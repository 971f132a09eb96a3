"""The pages for users name everything there is."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.metric_names import MISSES
from trunkline.api.embeddings import EmbeddingsRequest
from trunkline.api.messages_protocol import MessagesRequest
from trunkline.api.metrics import OTHER
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.rerank import RerankRequest, ScoreQueriesRequest, ScoreTextsRequest
from trunkline.api.responses_protocol import ResponsesRequest
from trunkline.cli import make_parser

DOCS = Path(__file__).parents[2] / "docs"


def cells(page: str) -> set[str]:
    """Everything in `code` in the tables of a page."""
    rows = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return {code for row in rows for code in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize(
    "request_type",
    [
        ChatRequest,
        CompletionRequest,
        EmbeddingsRequest,
        MessagesRequest,
        RerankRequest,
        ResponsesRequest,
        ScoreQueriesRequest,
        ScoreTextsRequest,
    ],
)
def test_every_field_is_in_the_table(request_type: type[Any]) -> None:
    fields = {*request_type.model_fields, *request_type.unsupported}
    assert fields - cells("api.md") == set()


@pytest.mark.parametrize("page", ["api.md", "cache.md", "rag.md"])
def test_every_reason_of_a_miss_is_in_the_table(page: str) -> None:
    assert MISSES - {OTHER} - cells(page) == set()


@pytest.mark.parametrize(("command", "page"), [("serve", "cli.md"), ("chat", "cli.md"), ("simulate", "simulator.md")])
def test_every_flag_is_in_the_table(command: str, page: str) -> None:
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    flags = {flag for action in commands.choices[command]._actions for flag in action.option_strings}
    found = {cell.split()[0] for cell in cells(page) if cell.startswith("-")} | {"--model"}
    assert flags - {"-h", "--help"} - found == set()

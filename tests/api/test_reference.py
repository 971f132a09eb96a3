"""docs/reference.md is what the server says of itself today."""

from pathlib import Path
from typing import Any

from trunkline.api.reference import COMMAND, document, main, render

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(document()), f"run `{COMMAND}`, or `make docs`"


def test_it_is_written_where_one_says(tmp_path: Path) -> None:
    assert main([str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == render(document())


def test_a_small_description() -> None:
    text: dict[str, Any] = {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]}
    properties = {"a": {"type": "integer", "minimum": 1}, "b": text}
    body = {"type": "object", "properties": properties, "required": ["a"]}
    more = {**body, "properties": {**properties, "c": {"enum": ["x", None]}}}
    answer = {"properties": {"d": text, "e": {"type": "array", "items": {"$ref": "#/s/Part"}}}, "required": ["d"]}
    schemas = {"ChatRequest": more, "CompletionRequest": body, "Answer": answer, "Part": {"type": "string"}}

    def refers(name: str) -> dict[str, object]:
        return {"content": {"application/json": {"schema": {"$ref": f"#/s/{name}"}}}}

    def operation(name: str) -> dict[str, object]:
        return {
            "description": "It\nanswers.",
            "requestBody": refers(name),
            "responses": {"200": refers("Answer"), "400": {}},
        }

    paths = {"/x": {"post": operation("ChatRequest")}, "/y": {"post": operation("CompletionRequest")}}
    lines = render({"paths": paths, "components": {"schemas": schemas}}).splitlines()
    assert "| `POST /x` | It answers. | `ChatRequest` | `Answer` | 400 |" in lines
    assert lines.count("| `a` | integer, at least 1 |  |") == 1, "what is common stands once"
    assert "| `b` | string, up to 8 characters | `null` |" in lines
    assert '| `c` | `"x"`, `null` | `null` |' in lines
    assert "nothing else." in lines, "of completions"
    assert "| `Answer` | `d` string, up to 8 characters or null · `e` list of `Part`? |" in lines
    assert "| `Part` | string |" in lines

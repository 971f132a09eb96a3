"""The Grafana dashboard and the alerts ask for what a server shows: names, kinds and labels."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.api.metric_names import SAMPLES, TABLE
from tests.deploy.promql import names, problems
from trunkline.api.metrics import SERVER_FAILURES

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "trunkline.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
OPERATING = (DEPLOY.parent / "docs" / "operating.md").read_text(encoding="utf-8")
# Without a panel: what both processes tell beside CPU, memory and files.
NOT_SHOWN = {"virtual_memory_bytes", "start_time_seconds", "max_fds"}
DURATION = re.compile(r"\d+[smhd]")
UNITS = {"none", "short", "reqps", "s", "percentunit", "bytes"}  # Grafana's ids


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def queries() -> list[tuple[str, str]]:
    """Of the dashboard and the rules, with the name of whoever asks."""
    found = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    return found + [(rule["alert"], rule["expr"]) for rule in RULES]


@pytest.mark.parametrize(("who", "expression"), queries())
def test_every_query_is_about_what_is_there(who: str, expression: str) -> None:
    assert problems(expression) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(trunkline:num_requests_running[5m])", "which is a gauge"),
        ("deriv(trunkline:prompt_tokens_total[5m])", "which is no gauge"),
        ("sum(trunkline:prompt_tokens_total)", "without a rate"),
        ("trunkline:num_requests_runing", "not on the page"),
        ("rate(trunkline:step_seconds[5m])", "not on the page"),
        ('trunkline:num_requests_running{tier="device"}', "by tier"),
        ('trunkline:kv_cache_usage_perc{tier="gpu"}', "never has tier='gpu'"),
        ("sum by (tier) (trunkline:num_requests_running)", "by tier"),
        ("histogram_quantile(0.9, sum(rate(trunkline:step_seconds_bucket[5m])))", "no le"),
        ("histogram_quantile(0.9, sum by (le) (rate(trunkline:step_seconds_sum[5m])))", "by le"),
        ("sum(rate(trunkline:step_seconds_bucket[5m]))", "wants buckets"),
        ("trunkline:num_requests_running > $limit", "unknown variable"),
    ],
)
def test_a_wrong_query_is_found(expression: str, problem: str) -> None:
    found = problems(expression)
    assert found and problem in " ".join(found)


def test_the_dashboard_shows_everything() -> None:
    asked = set().union(*(names(target["expr"]) for panel in panels() for target in panel["targets"]))
    shown = {name for name in TABLE if any(sample in asked for sample in SAMPLES if sample.startswith(name))}
    assert {name for name in TABLE.keys() - shown if not name.endswith(tuple(NOT_SHOWN))} == set()


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    assert DASHBOARD["schemaVersion"] == 42
    assert DASHBOARD["uid"] and DASHBOARD["title"] and DASHBOARD["id"] is None
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["type"] in ("timeseries", "stat")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["title"] and panel["description"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}


def test_no_panel_covers_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} covers {taken.get(cell)}"
            taken[cell] = panel["title"]


def test_variables() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert [(name, variable["type"]) for name, variable in variables.items()] == [
        ("datasource", "datasource"),
        ("model", "query"),
        ("instance", "query"),
    ]
    for name in ("model", "instance"):
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variables[name]["query"]["query"])
        assert asked is not None
        assert problems(asked[1]) == []
        assert asked[2] in {*TABLE["trunkline:engine_ready"].labels, "instance"}
        assert variables[name]["definition"] == variables[name]["query"]["query"]


def test_rules_are_complete() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert DURATION.fullmatch(rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        for text in rule["annotations"].values():
            for label in re.findall(r"\$labels\.(\w+)", text):
                assert label == "instance" or f"{label}" in rule["expr"], f"{rule['alert']} tells of {label}"
        assert f"`{rule['alert']}`" in OPERATING, "docs/operating.md says what to do"


def test_codes_that_alerts_watch_are_there_from_the_start() -> None:
    """Else the first of them would not count: Prometheus sees no step from nothing to one."""
    watched = {
        code
        for _, expression in queries()
        for group in re.findall(r'code=~"([^"]+)"', expression)
        for code in group.split("|")
    }
    assert watched and watched <= set(SERVER_FAILURES)

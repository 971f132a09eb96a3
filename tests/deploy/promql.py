"""Is a PromQL expression about what /metrics shows? Read by Prometheus' own grammar, held against tests/api/metric_names.py.

problems('rate(trunkline:num_requests_running[5m])')
# ["rate of trunkline:num_requests_running, which is a gauge"]
"""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql

from tests.api.metric_names import SAMPLES

TARGET = {"instance", "job"}  # labels that Prometheus adds to everything
OF_COUNTERS = {"rate", "irate", "increase"}
OF_GAUGES = {"deriv", "delta", "predict_linear"}
# What Grafana puts in the place of its variables.
VARIABLES = {"$__rate_interval": "5m", "$instance": "a:1|b:2", "$model": "tiny"}


def problems(expression: str) -> list[str]:
    """What is wrong with it, in words."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    if "$" in expression:
        return [f"an unknown variable: {expression}"]
    return list(_of(promql.parse(expression), around=[]))


def names(expression: str) -> set[str]:
    """The metrics it reads."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    selectors = (node for node in _nodes(promql.parse(expression)) if isinstance(node, promql.VectorSelector))
    return {node.name for node in selectors if node.name is not None}


def _children(node: Any) -> list[Any]:
    found = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
    return [child for child in [*found, *(getattr(node, "args", None) or [])] if child is not None]


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _of(node: Any, around: list[Any]) -> Iterator[str]:
    if isinstance(node, promql.VectorSelector):
        yield from _of_selector(node, around)
    elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        known = {label for inner in _nodes(node.expr) for label in _labels(inner)}
        yield from (
            f"{node.op} by {label}, which nothing below has" for label in node.modifier.labels if label not in known
        )
    elif isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
        # PromQL's sum drops every label that is not named.
        sums = [inner for inner in _nodes(node) if isinstance(inner, promql.AggregateExpr)]
        if not sums or any(inner.modifier is None or "le" not in inner.modifier.labels for inner in sums):
            yield "histogram_quantile of what has no le"
    for child in _children(node):
        yield from _of(child, [*around, node])


def _of_selector(node: Any, around: list[Any]) -> Iterator[str]:
    name = node.name
    if name == "up":  # Prometheus' own
        return
    if name not in SAMPLES:
        yield f"{name}, which is not on the page"
        return
    kind, row = SAMPLES[name]
    functions = [outer.func.name for outer in around if isinstance(outer, promql.Call)]
    nearest = functions[-1] if functions else ""
    if kind in ("counter", "bucket") and nearest not in OF_COUNTERS:
        yield f"{name}, a counter, without a rate"
    if nearest in OF_COUNTERS and kind == "gauge":
        yield f"{nearest} of {name}, which is a gauge"
    if nearest in OF_GAUGES and kind != "gauge":
        yield f"{nearest} of {name}, which is no gauge"
    if ("histogram_quantile" in functions) != (kind == "bucket"):
        yield f"a quantile wants buckets, and buckets a quantile: {name}"
    for matcher in node.matchers.matchers:
        if matcher.name not in {*row.labels, *TARGET}:
            yield f"{name} by {matcher.name}, which it does not have"
        allowed = row.labels.get(matcher.name)
        if allowed is not None and matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re):
            wrong = set(re.split(r"\|", matcher.value)) - allowed
            yield from (f"{name} never has {matcher.name}={value!r}" for value in sorted(wrong))


def _labels(node: Any) -> set[str]:
    if not isinstance(node, promql.VectorSelector) or node.name not in SAMPLES:
        return set()
    kind, row = SAMPLES[node.name]
    return {*row.labels, *TARGET, *(["le"] if kind == "bucket" else [])}

"""The line chart: every curve, in its place."""

import re
import xml.etree.ElementTree as ET

from loadtests.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, line_chart


def curves(page: str) -> dict[str, list[tuple[float, float]]]:
    svg = ET.fromstring(page[page.index("<svg") :])
    names = [text.text or "" for text in svg.findall("text") if text.get("fill")]
    lines = [
        [tuple(map(float, point.split(","))) for point in one.get("points", "").split()]
        for one in svg.findall("polyline")
    ]
    return dict(zip(names, lines, strict=True))  # type: ignore[arg-type]


def test_points_are_placed_by_time_and_value() -> None:
    found = curves(line_chart("x", {"b": [(0, 0), (10, 50)], "a": [(5, 100)]}, top=100))
    left, right, upper, lower = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    assert found == {"a": [((left + right) / 2, upper)], "b": [(left, lower), (right, (upper + lower) / 2)]}


def test_without_a_top_the_highest_point_is_there() -> None:
    ((_, points),) = curves(line_chart("x", {"a": [(1, 7), (2, 14)]})).items()
    assert points[1][1] == TOP


def test_nothing_is_drawn_of_nothing() -> None:
    assert curves(line_chart("x", {})) == {}


def test_names_are_escaped() -> None:
    assert re.search("&lt;b&gt;", line_chart("<b>", {"<i>": [(0, 1)]}))
    assert "<i>" in curves(line_chart("t", {"<i>": [(0, 1)]}))

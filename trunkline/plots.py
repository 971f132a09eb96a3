"""Pictures of numbers, as PNG files. Needs matplotlib, an extra: without it, a sentence says what to install."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from trunkline.sweep import Point

# Okabe and Ito's eight colours, which people who see few colours can tell apart (yellow last: it is faint on white).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
MARKERS = "osD^vPX*"
CLOSE = 0.006  # of a panel's height: curves that are nearer than that coincide
STRIPE = 4.0  # length of a stripe, in widths of the line
MARKER_SIZE, APART = 7.0, 6.5  # points: of a marker, and from one to the next that would hide it

# What a sweep's picture shows, panel by panel.
SHOWN: dict[str, Callable[["Point"], float]] = {
    "hit rate, %": lambda point: 100 * point.report.hit_rate,
    "mean time to first token, s": lambda point: point.report.ttft.mean,
    "99th percentile of time to first token, s": lambda point: point.report.ttft.p99,
}


def check_matplotlib(flag: str) -> None:
    """Raises ConfigError if `flag` asks for a picture and matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{flag} draws with matplotlib, which is not installed; install it with:"
            f" {sys.executable} -m pip install matplotlib"
        ) from None


def draw_sweep(points: Sequence["Point"], path: Path, *, title: str) -> None:
    """Hit rate, mean and 99th percentile of time to first token, a panel each.

    Against the size of the cache, a line for each policy; with one size only, a bar for each policy.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    sizes = sorted({point.cache_tokens for point in points})
    draw = _lines if len(sizes) > 1 else _bars
    for axes, (what, value) in zip(panels, SHOWN.items(), strict=True):
        draw(axes, points, value)
        axes.set_title(what, fontsize="medium")
        axes.set_ylim(0, 1.06 * _highest(points, value))
        axes.grid(axis="y", color="#dddddd")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if len(sizes) > 1:
        figure.legend(handles=_legend(points), loc="outside lower center", ncols=8, frameon=False)
    else:
        title = f"{title}\n{short_count(sizes[0])} tokens of cache"
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)


def _lines(axes: "Axes", points: Sequence["Point"], value: Callable[["Point"], float]) -> None:
    """A curve for each policy. Where several run on top of each other, they share the line in stripes, and their
    markers stand side by side: none hides another."""
    from matplotlib.transforms import ScaledTranslation

    heights = {(point.policy, point.cache_tokens): value(point) for point in points}
    policies = list(dict.fromkeys(point.policy for point in points))
    sizes = sorted({point.cache_tokens for point in points})
    close = CLOSE * _highest(points, value)
    for left, right in pairwise(sizes):
        ends = {policy: (heights[policy, left], heights[policy, right]) for policy in policies}
        for policy, (place, num) in side_by_side(ends, close).items():
            dashes = (place * STRIPE, (STRIPE, (num - 1) * STRIPE)) if num > 1 else "solid"
            axes.plot([left, right], ends[policy], color=_color(policies, policy), linestyle=dashes, zorder=2)
    for size in sizes:
        for policy, (place, num) in side_by_side({name: (heights[name, size],) for name in policies}, close).items():
            aside = ScaledTranslation((place - (num - 1) / 2) * APART / 72, 0, axes.figure.dpi_scale_trans)
            axes.plot(
                [size],
                [heights[policy, size]],
                color=_color(policies, policy),
                marker=_marker(policies, policy),
                markeredgecolor="white",
                markersize=MARKER_SIZE,
                transform=axes.transData + aside,
                zorder=3,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [short_count(size) for size in sizes])
    axes.margins(x=0.1)
    axes.minorticks_off()
    axes.set_xlabel("cache, tokens")


def side_by_side(heights: Mapping[str, tuple[float, ...]], close: float) -> dict[str, tuple[int, int]]:
    """Who coincides: of each name its place among those that are no further than `close` from the first of them, and
    their number.

    side_by_side({"a": (1.0, 2.0), "b": (5.0, 5.0), "c": (1.0, 2.001)}, 0.01)
    # {"a": (0, 2), "b": (0, 1), "c": (1, 2)}

    A name whose heights are NaN is left out: there is nothing to draw.
    """
    groups: list[list[str]] = []
    for name, mine in heights.items():
        if any(map(math.isnan, mine)):
            continue
        for group in groups:
            if all(abs(a - b) <= close for a, b in zip(heights[group[0]], mine, strict=True)):
                group.append(name)
                break
        else:
            groups.append([name])
    places = {name: (place, len(group)) for group in groups for place, name in enumerate(group)}
    return {name: places[name] for name in heights if name in places}


def _legend(points: Sequence["Point"]) -> list["Line2D"]:
    from matplotlib.lines import Line2D

    policies = list(dict.fromkeys(point.policy for point in points))
    return [
        Line2D([], [], color=_color(policies, policy), marker=_marker(policies, policy), label=policy)
        for policy in policies
    ]


def _color(policies: list[str], policy: str) -> str:
    return COLORS[policies.index(policy) % len(COLORS)]


def _marker(policies: list[str], policy: str) -> str:
    return MARKERS[policies.index(policy) % len(MARKERS)]


def _highest(points: Sequence["Point"], value: Callable[["Point"], float]) -> float:
    """Of the values that are there; never 0."""
    return max((height for height in map(value, points) if not math.isnan(height)), default=0.0) or 1.0


def _bars(axes: "Axes", points: Sequence["Point"], value: Callable[["Point"], float]) -> None:
    heights = [value(point) for point in points]
    bars = axes.bar([point.policy for point in points], heights, color=COLORS[: len(points)], width=0.6)
    labels = ["none" if math.isnan(height) else f"{height:.3g}" for height in heights]
    axes.bar_label(bars, labels, fontsize="small")


def short_count(number: int) -> str:
    """ "512K", "1M", "1.5M": in powers of 1,024, as sizes of memory."""
    for factor, unit in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if number >= factor:
            return f"{math.floor(number / factor * 100 + 0.5) / 100:g}{unit}"
    return str(number)

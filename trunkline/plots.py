"""Pictures of numbers, as PNG files. Needs matplotlib, an extra: without it, a sentence says what to install."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trunkline.sweep import Point

# Okabe and Ito's eight colours, which people who see few colours can tell apart (yellow last: it is faint on white).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
MARKERS = "osD^vPX*"

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
            f"{flag} draws with matplotlib, which is not installed; install it with: pip install matplotlib"
        ) from None


def draw_sweep(points: Sequence["Point"], path: Path, *, title: str) -> None:
    """Hit rate, mean and 99th percentile of time to first token, a panel each.

    Against the size of the cache, a line for each policy; with one size only, a bar for each policy.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    sizes = sorted({point.cache_tokens for point in points})
    draw = _lines if len(sizes) > 1 else _bars
    for axes, (what, value) in zip(panels, SHOWN.items(), strict=True):
        draw(axes, points, value)
        axes.set_title(what, fontsize="medium")
        axes.set_ylim(0, 1.06 * max(map(value, points)) or 1)
        axes.grid(axis="y", color="#dddddd")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if len(sizes) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
    else:
        title = f"{title}\n{short_count(sizes[0])} tokens of cache"
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)


def _lines(axes: "Axes", points: Sequence["Point"], value: Callable[["Point"], float]) -> None:
    for number, policy in enumerate(dict.fromkeys(point.policy for point in points)):
        mine = sorted((point for point in points if point.policy == policy), key=lambda point: point.cache_tokens)
        axes.plot(
            [point.cache_tokens for point in mine],
            [value(point) for point in mine],
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            label=policy,
        )
    sizes = sorted({point.cache_tokens for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [short_count(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("cache, tokens")


def _bars(axes: "Axes", points: Sequence["Point"], value: Callable[["Point"], float]) -> None:
    heights = [value(point) for point in points]
    bars = axes.bar([point.policy for point in points], heights, color=COLORS[: len(points)], width=0.6)
    axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize="small")


def short_count(number: int) -> str:
    """ "512K", "1M", "1.5M": in powers of 1,024, as sizes of memory."""
    for factor, unit in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if number >= factor:
            return f"{math.floor(number / factor * 100 + 0.5) / 100:g}{unit}"
    return str(number)

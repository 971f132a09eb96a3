"""Pictures of sweeps: every curve can be seen, wherever the others run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trunkline.plots import COLORS, draw_sweep, side_by_side

NAN = float("nan")


def test_side_by_side() -> None:
    assert side_by_side({"a": (1.0, 2.0), "b": (5.0, 5.0), "c": (1.0, 2.001)}, 0.01) == {
        "a": (0, 2),
        "b": (0, 1),
        "c": (1, 2),
    }
    assert side_by_side({"a": (1.0, 2.0), "b": (1.0, 2.1)}, 0.01) == {"a": (0, 1), "b": (0, 1)}
    assert side_by_side({"a": (1.0,), "b": (NAN,), "c": (1.0,)}, 0.0) == {"a": (0, 2), "c": (1, 2)}
    assert side_by_side({}, 1.0) == {}


def point(policy: str, size: int, value: float) -> Any:
    ttft = SimpleNamespace(mean=value, p99=2 * value)
    return SimpleNamespace(policy=policy, cache_tokens=size, report=SimpleNamespace(hit_rate=value, ttft=ttft))


@pytest.mark.slow
@pytest.mark.parametrize("num_sizes", [2, 1])
def test_curves_that_coincide_are_all_seen(tmp_path: Path, num_sizes: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    policies = ("window", "fcfs", "lpm", "shortest")
    points = [point(policy, 2**15 * 2**i, 0.25 + i / 4) for policy in policies for i in range(num_sizes)]
    draw_sweep(points, tmp_path / "sweep.png", title="the same for all")
    pixels = image.imread(tmp_path / "sweep.png")[..., :3]
    height, width, _ = pixels.shape
    plots = pixels[: int(height * 0.85)]  # above the legend
    for color in COLORS[: len(policies)]:
        rgb = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        is_color = abs(plots - rgb).max(axis=2) < 0.02
        for panel in range(3):
            assert is_color[:, panel * width // 3 : (panel + 1) * width // 3].sum() > 50, (color, panel)


@pytest.mark.slow
def test_sizes_at_which_nothing_was_served(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for sizes in ((2**10, 2**15), (2**10,)):
        draw_sweep([point("fcfs", size, 0.5 if size > 2**10 else NAN) for size in sizes], tmp_path / "a.png", title="")
        assert (tmp_path / "a.png").exists()

"""A line chart as inline SVG, without a script: curves over seconds. Knows nothing of what they mean."""

from html import escape

Series = dict[str, list[tuple[float, float]]]  # name -> points (seconds, value), in order of time

WIDTH, HEIGHT = 720, 220
LEFT, BOTTOM, TOP, RIGHT = 60, 30, 16, 90  # room around the curves, the names stand on the right
COLOURS = ("#1565c0", "#c62828", "#2e7d32", "#ef6c00", "#6a1b9a", "#00838f")


def line_chart(title: str, series: Series, *, top: float | None = None) -> str:
    """`top` is the value at the upper edge; left out, it is the highest of all points. The lower edge is 0."""
    points = [point for curve in series.values() for point in curve]
    seconds = max((x for x, _ in points), default=0) or 1.0
    top = top or max((y for _, y in points), default=0) or 1.0
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> str:
        return f"{LEFT + across * x / seconds:.1f},{TOP + down * (1 - min(y, top) / top):.1f}"

    parts = [f'<h3>{escape(title)}</h3><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">']
    for share in (0.0, 0.5, 1.0):
        y = TOP + down * (1 - share)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" font-size="12">{top * share:,.0f}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" font-size="12">{seconds:.0f} s</text>')
    for number, (name, curve) in enumerate(sorted(series.items())):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(place(x, y) for x, y in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = WIDTH - RIGHT + 10, TOP + 12 + 18 * number
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}" font-size="13">{escape(name)}</text>')
    return "".join(parts) + "</svg>"

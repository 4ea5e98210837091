"""Draws what `scripts/bench load --json` wrote: GB/s of each loader, case by case, beside the ceiling. SVG, by hand.

`scripts/bench plot FILE.json OUT.svg`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LABELS, NUMBERS = 860, 210, 130  # pixels: all, left of the bars, right of them
BAR, GAP, HEAD, FOOT = 18, 6, 46, 14
OURS, OTHER, CEILING, SPREAD = "#1f6f4a", "#9aa7b1", "#b3432b", "#30383e"
STYLE = "text{font:13px sans-serif;fill:#1d2327}.t{font-weight:bold}.n{font-size:12px}"


def draw(result: dict[str, Any]) -> str:
    """The picture; `ValueError` when there is nothing to draw."""
    rows: list[dict[str, Any]] = result["results"]
    if not rows:
        raise ValueError("no results in it")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    parts: list[str] = []
    y = FOOT
    for case in cases:
        panel = [row for row in rows if row["case"] == case]
        y = _panel(parts, y, panel, result["checkpoints"][panel[0]["checkpoint"]])
    note = f"{result['device']}, {result['cpus']} cores, {result['date'][:10]}; bar: median, line: least to greatest"
    parts.append(_text(10, y + 4, note, "n"))
    height = y + FOOT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", background, *parts, "</svg>", ""])


def _panel(parts: list[str], y: int, panel: list[dict[str, Any]], checkpoint: dict[str, Any]) -> int:
    """One case below `y`; returns where the next begins. Each case has a scale of its own."""
    ceilings = [row["gb_per_second"]["median"] / row["of_ceiling"] for row in panel if row["of_ceiling"]]
    top = max([*ceilings[:1], *(row["gb_per_second"]["max"] for row in panel)])
    scale = (WIDTH - LABELS - NUMBERS) / top
    title = f"{panel[0]['case']}: {checkpoint['tensors']:,} tensors, {checkpoint['bytes'] / 1e9:.1f} GB; GB/s"
    parts.append(_text(10, y + 18, title, "t"))
    bottom = y + HEAD - 18 + len(panel) * (BAR + GAP)
    for number, row in enumerate(panel):
        rates, at = row["gb_per_second"], y + HEAD - 18 + number * (BAR + GAP)
        middle = at + BAR / 2
        end = LABELS + rates["max"] * scale
        parts += [
            _text(10, at + 14, row["loader"]),
            _bar(at, rates["median"] * scale, OURS if row["loader"].startswith("weightcached") else OTHER),
            _line(LABELS + rates["min"] * scale, middle, end, middle, SPREAD),
            _text(max(end, LABELS + rates["median"] * scale) + 8, at + 14, _number(row), "n"),
        ]
    if ceilings:
        x = LABELS + ceilings[0] * scale
        parts.append(_line(x, y + HEAD - 22, x, bottom, CEILING))
        parts.append(_text(x - 4, y + HEAD - 24, f"ceiling {ceilings[0]:.1f}", "n", anchor="end"))
    return bottom + FOOT


def _number(row: dict[str, Any]) -> str:
    ratio = "" if row["ratio"] is None or row["loader"] == "weightcached" else f" ({row['ratio']:.2f} x)"
    return f"{row['gb_per_second']['median']:.2f}{ratio}"


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _bar(y: float, width: float, color: str) -> str:
    return f'<rect class="bar" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="1.5"/>'


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: bench plot FILE.json OUT.svg", file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    try:
        target.write_text(draw(json.loads(source.read_text())))
    except (OSError, ValueError, KeyError) as error:
        print(f"bench: {source}: {error!r} (is it of `bench load --json`?)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

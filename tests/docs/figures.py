#!/usr/bin/env python3
"""Draws the documentation's figures, light and dark, into host/docs/images.

    tests/docs/figures.py            check that the files are up to date; exit status 1 if not
    tests/docs/figures.py --write    write the files

The plot shows the numbers of the table in host/docs/tuning.md.
"""

import math
import pathlib
import re
import sys
from html import escape

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMAGES = ROOT / "host/docs/images"
TABLE = ROOT / "host/docs/tuning.md"

# Text, secondary text, lines, fill of boxes, fill of ranks, and one colour each for 2, 4 and 8 ranks.
THEMES = {
    "light": {
        "ink": "#1f2328", "soft": "#59636e", "grid": "#d1d9e0", "device": "#ddf4ff", "edge": "#0969da",
        "rank": "#f6f8fa", "series": {2: "#0072b2", 4: "#c2410c", 8: "#117733"},
    },
    "dark": {
        "ink": "#f0f6fc", "soft": "#9198a1", "grid": "#3d444d", "device": "#0c2d4f", "edge": "#4493f8",
        "rank": "#151b23", "series": {2: "#56b4e9", 4: "#f0a35e", 8: "#5dcaa5"},
    },
}

FONT = "font-family='Segoe UI, Noto Sans, Helvetica, Arial, sans-serif'"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def document(width, height, title, description, body):
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' "
        f"role='img' {FONT}>\n<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def text(x, y, words, colour, size=13, anchor="middle", weight="normal"):
    return (
        f"<text x='{x:g}' y='{y:g}' fill='{colour}' font-size='{size}' text-anchor='{anchor}' "
        f"font-weight='{weight}'>{escape(words)}</text>"
    )


def tree(theme):
    """Draw an aggregation tree of three devices and four ranks."""
    ink, soft, edge = theme["ink"], theme["soft"], theme["edge"]
    body = [
        "<defs>"
        + "".join(
            f"<marker id='{name}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            f"orient='auto-start-reverse'><path d='M0,0 L8,4 L0,8 z' fill='{colour}'/></marker>"
            for name, colour in (("up", edge), ("plain", soft))
        )
        + "</defs>"
    ]

    def box(x, y, width, fill, stroke, title, subtitle):
        body.append(
            f"<rect x='{x - width / 2:g}' y='{y:g}' width='{width}' height='46' rx='8' fill='{fill}' "
            f"stroke='{stroke}' stroke-width='1.5'/>"
        )
        body.append(text(x, y + 20, title, ink, 14, weight="600"))
        body.append(text(x, y + 36, subtitle, soft, 11))

    def hop(x1, y1, x2, y2):
        """Draw a contribution up and a result down, side by side."""
        side = 7 if x1 < x2 else -7
        body.append(
            f"<line x1='{x1 - side:g}' y1='{y1:g}' x2='{x2 - side:g}' y2='{y2:g}' stroke='{edge}' "
            "stroke-width='2' marker-end='url(#up)'/>"
        )
        body.append(
            f"<line x1='{x2 + side:g}' y1='{y2:g}' x2='{x1 + side:g}' y2='{y1:g}' stroke='{soft}' "
            "stroke-width='1.5' stroke-dasharray='5 3' marker-end='url(#plain)'/>"
        )

    leaves = {215: (125, 305), 565: (475, 655)}
    for leaf, ranks in leaves.items():
        hop(390 + (leaf - 390) * 0.75, 150, 390 + (leaf - 390) * 0.32, 76)
        for rank in ranks:
            hop(rank, 272, leaf + (rank - leaf) * 0.4, 198)
    box(390, 28, 190, theme["device"], edge, "root device", "completes the sum")
    for leaf in leaves:
        box(leaf, 151, 190, theme["device"], edge, "leaf device", "adds its children's data")
    for number, rank in enumerate(rank for ranks in leaves.values() for rank in ranks):
        box(rank, 274, 160, theme["rank"], soft, f"rank {number}", "P bytes out, P bytes in")
    body.append(
        f"<path d='M 46 340 H 734' stroke='{soft}' stroke-width='1.5' stroke-dasharray='2 4' fill='none' "
        "marker-start='url(#plain)' marker-end='url(#plain)'/>"
    )
    body.append(text(390, 360, "host collectives (ring, halving-doubling, ...) when no tree is available", soft, 12))
    body.append(
        f"<rect x='20' y='20' width='170' height='62' rx='8' fill='none' stroke='{soft}' stroke-width='1.5' "
        "stroke-dasharray='6 4'/>"
    )
    body.append(text(105, 41, "controller", ink, 14, weight="600"))
    body.append(text(105, 57, "plans trees, admits jobs;", soft, 11))
    body.append(text(105, 72, "not on the data path", soft, 11))
    for y, stroke, dash, words in (
        (40, edge, "", "contributions, summed on the way up"),
        (62, soft, "stroke-dasharray='5 3'", "one result, down to every child"),
    ):
        body.append(f"<line x1='530' y1='{y}' x2='560' y2='{y}' stroke='{stroke}' stroke-width='2' {dash}/>")
        body.append(text(568, y + 4, words, soft, 12, "start"))
    return document(
        800, 376, "An aggregation tree",
        "Four ranks send their data to two leaf devices. Each leaf adds what its ranks send and passes one partial sum "
        "to the root device. The root completes the sum and sends one result down to every child. A controller plans "
        "the tree. Without a tree the ranks reduce among themselves.",
        body,
    )


def measured():
    """Return the sizes, their names, and {(ranks, memory): ratios} from the table in the guide."""
    rows = [line.strip(" |").split("|") for line in TABLE.read_text(encoding="utf-8").splitlines() if "|" in line]
    rows = [[cell.strip() for cell in row] for row in rows]
    start = next(at for at, row in enumerate(rows) if row[0] == "ranks, memory")
    sizes = []
    for cell in rows[start][1:]:
        number, unit = cell.split()
        sizes.append(int(number) * UNITS[unit])
    lines = {}
    for row in rows[start + 2 :]:
        found = re.fullmatch(r"(\d+), (registered|plain)", row[0])
        if not found:
            break
        lines[int(found[1]), found[2]] = [float(cell.split()[0]) for cell in row[1:]]
    assert lines and all(len(values) == len(sizes) for values in lines.values()), "the table of tuning.md"
    return sizes, rows[start][1:], lines


def speed(theme):
    """Draw the ratios over the sizes, both on logarithmic axes."""
    sizes, names, lines = measured()
    ink, soft = theme["ink"], theme["soft"]
    left, right, top, bottom = 62, 630, 44, 330
    low, high = math.log10(0.05), math.log10(10)
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def x(size):
        return left + (math.log2(size) - first) / (last - first) * (right - left)

    def y(ratio):
        return bottom - (math.log10(ratio) - low) / (high - low) * (bottom - top)

    body = [text(left - 44, 22, "Best MPI's time / Sumac's time (above 1, Sumac is faster)", ink, 14, "start", "600")]
    for ratio in (0.1, 0.2, 0.5, 1, 2, 5, 10):
        strong = ratio == 1
        body.append(
            f"<line x1='{left}' y1='{y(ratio):.1f}' x2='{right}' y2='{y(ratio):.1f}' "
            f"stroke='{soft if strong else theme['grid']}' stroke-width='{1.5 if strong else 1}'/>"
        )
        body.append(text(left - 8, y(ratio) + 4, f"{ratio:g}", ink if strong else soft, 12, "end"))
    body.append(text(right - 6, y(1) + 16, "below: the best MPI is faster", soft, 12, "end"))
    for size, name in zip(sizes, names):
        body.append(text(x(size), bottom + 18, name, soft, 12))
    body.append(text((left + right) / 2, bottom + 38, "message size", soft, 12))
    for (ranks, memory), values in lines.items():
        colour = theme["series"][ranks]
        dash = "" if memory == "registered" else " stroke-dasharray='6 4'"
        points = [(x(size), y(value)) for size, value in zip(sizes, values)]
        body.append(
            "<polyline fill='none' stroke-linejoin='round' "
            f"points='{' '.join(f'{px:.1f},{py:.1f}' for px, py in points)}' stroke='{colour}' stroke-width='2.2'{dash}/>"
        )
        body += [f"<circle cx='{px:.1f}' cy='{py:.1f}' r='3' fill='{colour}'/>" for px, py in points]
        body.append(text(points[-1][0] + 8, points[-1][1] + 4, f"{ranks} ranks, {memory}", colour, 12, "start"))
    series = "; ".join(
        f"{ranks} ranks, {memory}: " + ", ".join(f"{name} {value:g}" for name, value in zip(names, values))
        for (ranks, memory), values in lines.items()
    )
    return document(760, 382, "All-reduce of f32 sums on one machine, against the best MPI", series, body)


def main():
    pictures = {
        f"{name}-{theme}.svg": draw(colours)
        for name, draw in (("tree", tree), ("speed", speed))
        for theme, colours in THEMES.items()
    }
    if sys.argv[1:] == ["--write"]:
        IMAGES.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (IMAGES / name).write_text(picture, encoding="utf-8")
        return 0
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    stale = [
        name
        for name, picture in pictures.items()
        if not (IMAGES / name).exists() or (IMAGES / name).read_text(encoding="utf-8") != picture
    ]
    for name in stale:
        print(f"host/docs/images/{name}: out of date; run tests/docs/figures.py --write")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

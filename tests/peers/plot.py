#!/usr/bin/env python3
"""Plots the samples of compare.py: time over bytes, one line per series, one panel per number of ranks.

    plot.py TSV SVG

A separate program because matplotlib may belong to another interpreter.
"""

import sys

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt  # noqa: E402

import results as store  # noqa: E402

PANEL_INCHES = (5.2, 5.0)
LEGEND_INCHES = 2.6
# Sumac's lines stand out by colour and width.
OWN = "sumac"
OTHERS = ["C0", "C1", "C2", "C4", "C5", "C6", "C8", "C9"]


def style(name, index):
    if name.startswith(OWN):
        shape = {"linestyle": ["-", "--", "-.", ":"][index % 4], "marker": "os^vDP"[index % 6]}
        return {"color": "C3", "linewidth": 2.0} | shape
    if name == "bare":
        return {"color": "black", "linewidth": 1.0, "linestyle": ":"}
    return {"color": OTHERS[index % len(OTHERS)], "linewidth": 1.2, "marker": "."}


def draw_panel(axes, results, ranks):
    counts = {True: 0, False: 0}
    for name in results.series():
        own = name.startswith(OWN)
        cells = [(size, results.cell(ranks, name, size)) for size in results.sizes()]
        points = [(size, cell.time_us) for size, cell in cells if cell]
        appearance = style(name, counts[own])
        counts[own] += 1
        if points:
            axes.plot(*zip(*points), label=results.titles[name], markersize=5, **appearance)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(results.sizes(), [store.size_name(size) for size in results.sizes()], rotation=60)
    axes.minorticks_off()
    axes.set_title(f"{ranks} ranks")
    axes.set_xlabel("message")
    axes.grid(True, alpha=0.3)


def main():
    if len(sys.argv) != 3:
        print("usage: plot.py TSV SVG", file=sys.stderr)
        return 2
    results = store.read(sys.argv[1])
    if not results.ranks():
        print(f"plot: {sys.argv[1]} holds no samples", file=sys.stderr)
        return 1
    panels = len(results.ranks())
    size = (PANEL_INCHES[0] * panels + LEGEND_INCHES, PANEL_INCHES[1])
    figure, axes = plt.subplots(1, panels, sharey=True, squeeze=False, figsize=size, layout="constrained")
    for panel, ranks in zip(axes[0], results.ranks()):
        draw_panel(panel, results, ranks)
    axes[0][0].set_ylabel("all-reduce, f32 sum: time in us")
    # A series may be missing from some panels, so the legend is collected from all of them.
    lines = {label: line for panel in axes[0] for line, label in zip(*panel.get_legend_handles_labels())}
    order = [title for title in results.titles.values() if title in lines]
    axes[0][-1].legend([lines[title] for title in order], order, loc="center left", bbox_to_anchor=(1.03, 0.5))
    figure.savefig(sys.argv[2], format="svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())

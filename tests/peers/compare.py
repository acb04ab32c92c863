#!/usr/bin/env python3
"""Sets Sumac's tree beside what one would otherwise take, on one machine, in one session.

Every competitor runs in each of the rounds, in turns and from a different start, so that a machine that slows down
slows down all of them. A cell is the median over the rounds of a run's median over its iterations of the slowest
rank's time. Times of two sessions can't be compared; ratios within one can, beside the round trip of a cache line.

A ratio is the other's time over Sumac's, so above 1 Sumac is faster; it is also the ratio of algorithm bandwidths.
A competitor that takes too long is cut off; what it had measured by then counts, and it is not run again.
All samples are kept in compare.tsv, and drawn in compare.svg.
"""

import argparse
import os
import pathlib
import re
import sys

import process
import report
import results as store
import series as competitors

DEFAULTS = {
    "ranks": [2, 4, 8],
    "sizes": [8, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20],
    "rounds": 3,
    "limit": 60,
}
QUICK = {"ranks": [2], "sizes": [8, 64 << 10, 1 << 20], "rounds": 1, "limit": 30}
RANKS_MAX = 64
SIZE_MAX = 1 << 30
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
CACHE_LINE_LIMIT_S = 30
PLOT_LIMIT_S = 120
# More than this many processes that want to run, before anything is measured, are somebody else's.
BUSY = 0.5


class Comparison:
    def __init__(self, options):
        self.options = options
        self.results = store.Results()
        self.results.titles = {series.name: series.title for series in options.chosen}
        self.notes = list(options.left_out)
        self.line_ns = []
        self.failed = False
        # {(ranks, series, variant): the sizes still worth trying}; a stall in every round would take most of the time
        self.sizes = {}

    def note(self, text):
        if text not in self.notes:
            print(f"compare: {text}", file=sys.stderr)
            self.notes.append(text)

    def probe(self):
        self.line_ns.append(float(process.output([cache_line(self.options)], CACHE_LINE_LIMIT_S)))

    def identify(self):
        """Note which version each series is; one that can't even say that is left out."""
        known = {series.needs: "" for series in self.options.chosen if series.version is None}
        for series in list(self.options.chosen):
            if series.needs not in known:
                try:
                    known[series.needs] = series.version(self.options)
                except process.Failed as failure:
                    known[series.needs] = None
                    self.failed = True
                    self.note(f"{series.needs} is left out, it does not start: {failure}")
            if known[series.needs] is None:
                self.options.chosen.remove(series)
        self.notes.insert(0, "measured: " + ", ".join(filter(None, known.values())))

    def run(self):
        """Measure all, and keep what there is after each round."""
        turns = [(series, variant) for series in self.options.chosen for variant in series.variants]
        for turn in range(self.options.rounds):
            first = turn * len(turns) // self.options.rounds
            for ranks in self.options.ranks:
                # At the start and at the end, to see whether the machine moved in between.
                self.probe()
                for series, variant in turns[first:] + turns[:first]:
                    self.take(turn + 1, ranks, series, variant)
                self.probe()
            self.keep()

    def take(self, turn, ranks, series, variant):
        """Measure one variant of a series once."""
        key = ranks, series.name, variant
        sizes = self.sizes.setdefault(key, list(self.options.sizes))
        if not sizes:
            return
        what = " ".join(filter(None, (series.title, variant)))
        print(f"round {turn} of {self.options.rounds}, {ranks} ranks: {what}", file=sys.stderr)
        done = []
        problem = None
        try:
            for row in competitors.measure(series, variant, self.options, ranks, sizes):
                done.append(row.size_bytes)
                self.add(turn, ranks, series, variant, row)
        except process.Failed as failure:
            problem = failure
        lost = [size for size in sizes if size not in done]
        if not lost and problem is None:
            return
        cut_off = isinstance(problem, process.CutOff)
        self.failed |= not cut_off
        self.sizes[key] = [] if cut_off else done
        gone = ", ".join(map(store.size_name, lost)) or "nothing"
        self.note(f"{what}, {ranks} ranks, round {turn}: {problem or 'no result'}; lost: {gone}")

    def add(self, turn, ranks, series, variant, row):
        sample = {"ranks": ranks, "series": series.name, "variant": variant, "size_bytes": row.size_bytes}
        sample |= {"round": turn, "time_us": row.time_us, "cpu_us": row.cpu_us, "iterations": row.iterations}
        self.results.add(sample | {"cache_line_ns": self.line_ns[-1], "transport": row.transport})
        if "sumac-shm" in series.groups and row.transport in (None, "inline"):
            self.note(f"{series.title} was not: its rows say transport {row.transport}, so they came by UDP")

    def keep(self):
        store.write(self.results, self.notes, file_of(self.options, "tsv"))


def cache_line(options):
    return os.path.join(options.built, "cache_line")


def file_of(options, suffix):
    return os.path.join(options.built, f"compare.{suffix}")


def draw(options):
    """Draw the plot, with the interpreter that has what it takes; return whether that worked."""
    script = pathlib.Path(__file__).with_name("plot.py")
    try:
        process.output(
            [options.plot_python, str(script), file_of(options, "tsv"), file_of(options, "svg")], PLOT_LIMIT_S
        )
    except process.Failed as failure:
        print(f"compare: no plot: {failure}", file=sys.stderr)
        return False
    return True


# ---- options ----


def listed(words, parse):
    """Return what a list names, whether its parts are separated by commas or are arguments of their own."""
    return list(dict.fromkeys(parse(part) for word in words for part in word.split(",") if part))


def whole(least, most):
    def parse(text):
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parse


def size(text):
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    value = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < value <= SIZE_MAX or value % 4:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: a multiple of 4 up to 1G, in bytes or with K, M or G after it"
        )
    return value


def name(text):
    if text not in competitors.names():
        raise argparse.ArgumentTypeError(f"{text!r} is no series; there are {', '.join(competitors.names())}")
    return text


class Listed(argparse.Action):
    """A list of what one parser takes; `const` is that parser."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            found = listed(values, self.const)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        if not found:
            raise argparse.ArgumentError(self, "names nothing")
        setattr(namespace, self.dest, found)


def parser():
    made = argparse.ArgumentParser(
        prog="tests/peers/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Lists take commas, or are arguments of their own. Series: " + ", ".join(competitors.names()),
    )

    def lists(flag, parse, text, **more):
        made.add_argument(flag, nargs="+", action=Listed, const=parse, metavar=flag[2:].upper(), help=text, **more)

    lists("--ranks", whole(2, RANKS_MAX), "numbers of ranks [2,4,8]")
    lists("--sizes", size, "message sizes, multiples of 4, such as 8,64K,16M [8 B to 64 MiB]")
    lists("--only", name, "measure these series alone", default=[])
    lists("--without", name, "leave these series out", default=[])
    lists("--levels", whole(1, 2), "levels of Sumac's tree [1,2]", default=competitors.LEVELS)
    made.add_argument("--rounds", type=whole(1, 100), help="how often all is measured, in turns [3]")
    made.add_argument("--limit", type=whole(1, 3600), help="seconds that one run of a series may take [60]")
    made.add_argument("--in-place", action="store_true", help="let MPI reduce in place; otherwise out of place")
    made.add_argument("--quick", action="store_true", help="a smoke test: 2 ranks, 3 sizes, one round")
    made.add_argument("--gloo-only", action="store_true", help="the same as --only gloo")
    made.add_argument("--no-plot", action="store_true", help="draw nothing")
    made.add_argument("--json", action="store_true", help="JSON objects instead of the tables")
    # What `run` says to this program.
    made.add_argument("--needs", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--built", help=argparse.SUPPRESS)
    made.add_argument("--sumac", help=argparse.SUPPRESS)
    made.add_argument("--torch-python", help=argparse.SUPPRESS)
    made.add_argument("--plot-python", help=argparse.SUPPRESS)
    made.add_argument("--missing", action="append", default=[], help=argparse.SUPPRESS)
    return made


def parse(arguments):
    made = parser()
    options = made.parse_args(arguments)
    if options.gloo_only and options.only:
        made.error("--gloo-only and --only exclude each other; name gloo in --only")
    options.only = ["gloo"] if options.gloo_only else options.only
    for key, value in (QUICK if options.quick else DEFAULTS).items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    options.ranks.sort()
    options.sizes.sort()
    options.chosen = competitors.chosen(options.only, options.without, options.levels)
    if not options.chosen:
        made.error("--only, --without and --levels leave nothing to measure")
    return options


def leave_out(options):
    """Drop the series that can't be measured here, and say so."""
    options.left_out = []
    missing = dict(entry.split("=", 1) for entry in options.missing)
    needs = {series.needs for series in options.chosen}
    options.sumac_has = competitors.sumac_options(options.sumac) if "sumac" in needs else set()
    for series in list(options.chosen):
        why = missing.get(series.needs)
        lacks = competitors.sumac_lacks(series, options.sumac_has) if series.is_sumac else []
        if lacks:
            why = f"this `sumac perf` has no {' and no '.join(lacks)}"
        if why:
            options.chosen.remove(series)
            options.left_out.append(f"LEFT OUT: {series.title}: {why}")
    if "sumac" in needs and "--transport" not in options.sumac_has:
        options.left_out.append("this `sumac perf` has no --transport: Sumac udp is what it does without")
    for note in options.left_out:
        print(f"compare: {note}", file=sys.stderr)


def main():
    options = parse(sys.argv[1:])
    if options.needs:
        print(*dict.fromkeys(series.needs for series in options.chosen), *([] if options.no_plot else ["plot"]))
        return 0
    try:
        leave_out(options)
        comparison = Comparison(options)
        load = os.getloadavg()[0]
        if load > BUSY:
            comparison.note(f"the machine was busy before this began: load {load:.1f}; don't trust the times")
        if options.in_place:
            comparison.note("MPI reduces in place")
        comparison.identify()
        comparison.run()
    except process.Failed as failure:
        print(f"compare: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not comparison.results.samples:
        print("compare: nothing could be measured", file=sys.stderr)
        return 1
    if options.json:
        report.print_json(comparison.results, options.chosen, comparison.line_ns)
    else:
        report.print_text(comparison.results, options.chosen, comparison.notes, comparison.line_ns, options.rounds)
    if not options.no_plot:
        comparison.failed |= not draw(options)
    return int(comparison.failed)


if __name__ == "__main__":
    sys.exit(main())

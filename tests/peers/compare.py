#!/usr/bin/env python3
"""Compares Sumac's tree with other all-reduce implementations on one machine, in one session.

Each round runs every competitor once, in an order that rotates from round to round, so that a slowdown of the machine
affects all of them. A cell is the median over rounds of the median over iterations of the slowest rank's time. Times
from different sessions are not comparable; ratios within a session are, together with the cache-line round trip.

A ratio is the other's time divided by Sumac's: above 1 Sumac is faster. It equals the ratio of algorithm bandwidths.
A competitor that exceeds its time limit keeps the rows measured so far and is not run again.
All samples are stored in compare.tsv and plotted in compare.svg.
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
# A load average above this before the first measurement means that the machine is not idle.
IDLE_LOAD_MAX = 0.5


class Comparison:
    def __init__(self, options):
        self.options = options
        self.results = store.Results()
        self.results.titles = {series.name: series.title for series in options.chosen}
        self.notes = list(options.skipped)
        self.line_ns = []
        self.failed = False
        # {(ranks, series, variant): sizes to measure}. Sizes that failed are not retried: a stall in every round
        # would take most of the time.
        self.sizes = {}

    def note(self, text):
        if text not in self.notes:
            print(f"compare: {text}", file=sys.stderr)
            self.notes.append(text)

    def probe(self):
        self.line_ns.append(float(process.output([cache_line(self.options)], CACHE_LINE_LIMIT_S)))

    def identify(self):
        """Note the version of each series; drop series whose program does not start."""
        known = {series.needs: "" for series in self.options.chosen if series.version is None}
        for series in list(self.options.chosen):
            if series.needs not in known:
                try:
                    known[series.needs] = series.version(self.options)
                except process.Failed as failure:
                    known[series.needs] = None
                    self.failed = True
                    self.note(f"{series.needs} skipped, it does not start: {failure}")
            if known[series.needs] is None:
                self.options.chosen.remove(series)
        self.notes.insert(0, "measured: " + ", ".join(filter(None, known.values())))

    def run(self):
        """Measure everything; save the samples after each round."""
        entries = [(series, variant) for series in self.options.chosen for variant in series.variants]
        for turn in range(self.options.rounds):
            first = turn * len(entries) // self.options.rounds
            for ranks in self.options.ranks:
                # Before and after, to see whether the hypervisor moved the CPUs in between.
                self.probe()
                for series, variant in entries[first:] + entries[:first]:
                    self.measure(turn + 1, ranks, series, variant)
                self.probe()
            self.save()

    def measure(self, turn, ranks, series, variant):
        """Measure one variant of a series once."""
        key = ranks, series.name, variant
        sizes = self.sizes.setdefault(key, list(self.options.sizes))
        if not sizes:
            return
        title = " ".join(filter(None, (series.title, variant)))
        print(f"round {turn} of {self.options.rounds}, {ranks} ranks: {title}", file=sys.stderr)
        done = []
        problem = None
        try:
            for row in competitors.measure(series, variant, self.options, ranks, sizes):
                done.append(row.size_bytes)
                self.add(turn, ranks, series, variant, row)
        except process.Failed as failure:
            problem = failure
        missing = [size for size in sizes if size not in done]
        if not missing and problem is None:
            return
        timed_out = isinstance(problem, process.TimedOut)
        self.failed |= not timed_out
        self.sizes[key] = [] if timed_out else done
        names = ", ".join(map(store.size_name, missing)) or "none"
        self.note(f"{title}, {ranks} ranks, round {turn}: {problem or 'no result'}; missing sizes: {names}")

    def add(self, turn, ranks, series, variant, row):
        sample = {"ranks": ranks, "series": series.name, "variant": variant, "size_bytes": row.size_bytes}
        sample |= {"round": turn, "time_us": row.time_us, "cpu_us": row.cpu_us, "iterations": row.iterations}
        self.results.add(sample | {"cache_line_ns": self.line_ns[-1], "transport": row.transport})
        if "sumac-shm" in series.groups and row.transport in (None, "inline"):
            self.note(f"{series.title}: rows report transport {row.transport}, so UDP was measured instead")

    def save(self):
        store.write(self.results, self.notes, file_of(self.options, "tsv"))


def cache_line(options):
    return os.path.join(options.built, "cache_line")


def file_of(options, suffix):
    return os.path.join(options.built, f"compare.{suffix}")


def draw(options):
    """Draw the plot with the interpreter that has matplotlib; return whether that succeeded."""
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
    """Parse a list whose items are separated by commas, given as separate arguments, or both."""
    return list(dict.fromkeys(parse(part) for word in words for part in word.split(",") if part))


def integer(minimum, maximum):
    def parse(text):
        if not text.isdecimal() or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum} to {maximum}")
        return int(text)

    return parse


def size(text):
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    value = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < value <= SIZE_MAX or value % 4:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: expected a multiple of 4 up to 1G, with an optional suffix K, M or G"
        )
    return value


def name(text):
    if text not in competitors.names():
        raise argparse.ArgumentTypeError(f"unknown series {text!r}; known: {', '.join(competitors.names())}")
    return text


class Listed(argparse.Action):
    """A list option; `const` parses one item."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            found = listed(values, self.const)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        if not found:
            raise argparse.ArgumentError(self, "the list is empty")
        setattr(namespace, self.dest, found)


def parser():
    made = argparse.ArgumentParser(
        prog="tests/peers/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="List items are separated by commas or spaces. Series: " + ", ".join(competitors.names()),
    )

    def lists(flag, parse, text, **more):
        made.add_argument(flag, nargs="+", action=Listed, const=parse, metavar=flag[2:].upper(), help=text, **more)

    lists("--ranks", integer(2, RANKS_MAX), "numbers of ranks [2,4,8]")
    lists("--sizes", size, "message sizes, multiples of 4, such as 8,64K,16M [8 B to 64 MiB]")
    lists("--only", name, "measure only these series", default=[])
    lists("--without", name, "skip these series", default=[])
    lists("--levels", integer(1, 2), "levels of Sumac's tree [1,2]", default=competitors.LEVELS)
    made.add_argument("--rounds", type=integer(1, 100), help="number of rounds [3]")
    made.add_argument("--limit", type=integer(1, 3600), help="time limit of one run of a series, in seconds [60]")
    made.add_argument("--in-place", action="store_true", help="run Sumac and MPI in place instead of out of place")
    made.add_argument("--quick", action="store_true", help="a smoke test: 2 ranks, 3 sizes, one round")
    made.add_argument("--gloo-only", action="store_true", help="same as --only gloo")
    made.add_argument("--no-plot", action="store_true", help="do not draw the plot")
    made.add_argument("--json", action="store_true", help="print JSON objects instead of tables")
    # Internal: set by `run`.
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
        made.error("--gloo-only and --only exclude each other; add gloo to --only")
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


def skip_unavailable(options):
    """Drop the series that this machine cannot measure, and report each with the reason."""
    options.skipped = []
    missing = dict(entry.split("=", 1) for entry in options.missing)
    needs = {series.needs for series in options.chosen}
    options.sumac_has = competitors.sumac_options(options.sumac) if "sumac" in needs else set()
    for series in list(options.chosen):
        reason = missing.get(series.needs)
        unsupported = competitors.sumac_unsupported(series, options.sumac_has) if series.is_sumac else []
        if unsupported:
            reason = f"this `sumac perf` does not support {', '.join(unsupported)}"
        if reason:
            options.chosen.remove(series)
            options.skipped.append(f"SKIPPED: {series.title}: {reason}")
    if "sumac" in needs and "--transport" not in options.sumac_has:
        options.skipped.append("this `sumac perf` has no --transport; its default is measured as Sumac udp")
    for note in options.skipped:
        print(f"compare: {note}", file=sys.stderr)


def main():
    options = parse(sys.argv[1:])
    if options.needs:
        print(*dict.fromkeys(series.needs for series in options.chosen), *([] if options.no_plot else ["plot"]))
        return 0
    try:
        skip_unavailable(options)
        comparison = Comparison(options)
        load = os.getloadavg()[0]
        if load > IDLE_LOAD_MAX:
            comparison.note(f"the machine was not idle at the start: load average {load:.1f}; times are unreliable")
        where = "in place" if options.in_place else "out of place"
        comparison.note(f"Sumac and MPI reduce {where}, the others in place")
        comparison.identify()
        comparison.run()
    except process.Failed as failure:
        print(f"compare: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not comparison.results.samples:
        print("compare: no series could be measured", file=sys.stderr)
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

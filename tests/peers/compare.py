#!/usr/bin/env python3
"""Sets Sumac's tree beside Gloo's TCP algorithms, on one machine, in one session.

Every competitor runs in each of the rounds, in turns and from a different start, so that a machine that slows down
slows down all of them. A cell is the median over the rounds of a run's median over its iterations of the slowest
rank's time. Times of two sessions can't be compared; ratios within one can, beside the round trip of a cache line.

A ratio is Gloo's time over Sumac's, so above 1 Sumac is faster; it is also the ratio of algorithm bandwidths.
Called by `run` in this folder, which builds what is needed; see there for options.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20]
GLOO = ["ring", "ring_chunked", "halving_doubling", "bcube", "new_ring"]
LEVELS = [1, 2]
RUN_LIMIT_S = 120


class Failed(Exception):
    """A competitor that did not run, or ran wrong."""


def output(command):
    """Return what a command prints; it gets no longer than RUN_LIMIT_S, and leaves no process behind."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from error
    with process:
        try:
            text, _ = process.communicate(timeout=RUN_LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"{' '.join(command)}: no end after {RUN_LIMIT_S} s") from error
            raise
    if process.returncode != 0:
        raise Failed(f"{' '.join(command)}: exit status {process.returncode}")
    return text


def rows(text, keys):
    """Return the JSON objects among the lines, each with these keys at least."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for row in found:
        if not keys <= row.keys():
            raise Failed(f"a row lacks {', '.join(sorted(keys - row.keys()))}: {row}")
    return found


def gloo(options, algorithm):
    """Return Gloo's times in microseconds by size."""
    command = [options.gloo, algorithm, str(options.ranks), *map(str, options.sizes)]
    return {row["size_bytes"]: row["time_us"] for row in rows(output(command), {"size_bytes", "time_us"})}


def sumac(options, levels):
    """Return the tree's times in microseconds by size."""
    times = {}
    for size in options.sizes:
        command = [options.sumac, "perf", "-b", str(size), "-e", str(size), "--ranks", str(options.ranks)]
        command += ["--algo", "tree", "--levels", str(levels), "--json"]
        for row in rows(output(command), {"size_bytes", "time_us", "wrong", "path"}):
            if row["wrong"] != 0 or row["path"] != "tree":
                raise Failed(f"{' '.join(command)}: path {row['path']}, {row['wrong']} wrong elements")
            times[row["size_bytes"]] = row["time_us"]
    return times


def measure(options):
    """Run all rounds; return {competitor: {size: [time_us, one a round]}} and the cache line's round trips in ns."""
    competitors = [(("gloo", name), lambda name=name: gloo(options, name)) for name in GLOO]
    if options.sumac:
        competitors += [(("sumac", n), lambda n=n: sumac(options, n)) for n in LEVELS]
    samples = {key: {size: [] for size in options.sizes} for key, _ in competitors}
    line_ns = []
    for turn in range(options.rounds):
        # At the start of a round and at its end, to see whether the machine moved in between.
        line_ns.append(float(output([options.cache_line])))
        start = turn * len(competitors) // options.rounds
        for key, run in competitors[start:] + competitors[:start]:
            print(f"round {turn + 1} of {options.rounds}: {key[0]} {key[1]}", file=sys.stderr)
            for size, time_us in run().items():
                if size not in samples[key]:
                    raise Failed(f"{key[0]} {key[1]}: a result at {size} bytes, which was not asked for")
                samples[key][size].append(time_us)
        line_ns.append(float(output([options.cache_line])))
    for key, sizes in samples.items():
        for size, times in sizes.items():
            if len(times) != options.rounds:
                raise Failed(f"{key[0]} {key[1]}: {len(times)} results at {size} bytes, expected {options.rounds}")
    return samples, line_ns


def summary(options, samples):
    """Return one dict a size: best Gloo, and each Sumac tree with its ratio."""
    median = {key: {size: statistics.median(t) for size, t in sizes.items()} for key, sizes in samples.items()}
    table = []
    for size in options.sizes:
        best = min(GLOO, key=lambda name: median["gloo", name][size])
        row = {"size_bytes": size, "gloo_algorithm": best, "gloo_us": median["gloo", best][size]}
        for levels in LEVELS if options.sumac else []:
            time_us = median["sumac", levels][size]
            row[f"tree{levels}_us"] = time_us
            row[f"tree{levels}_ratio"] = row["gloo_us"] / time_us
        table.append(row)
    return table


def size_name(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def print_table(options, table, line_ns):
    print(f"all-reduce, f32 sum, {options.ranks} ranks on {os.cpu_count()} cores, median of {options.rounds} rounds; us")
    trips = ", ".join(f"{ns:.0f}" for ns in line_ns)
    print(f"cache line round trip between cores 0 and 1: {statistics.median(line_ns):.0f} ns ({trips})")
    head = f"{'size':>8} {'best Gloo':>12} {'':<18}"
    if options.sumac:
        head += f"{'tree, 1 level':>14} {'ratio':>6} {'2 levels':>14} {'ratio':>6}"
    print(head)
    for row in table:
        line = f"{size_name(row['size_bytes']):>8} {row['gloo_us']:12.1f} {row['gloo_algorithm']:<18}"
        for levels in LEVELS if options.sumac else []:
            line += f"{row[f'tree{levels}_us']:14.1f} {row[f'tree{levels}_ratio']:6.2f} "
        print(line.rstrip())


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gloo", required=True, help="the driver built from gloo_allreduce.cc")
    parser.add_argument("--cache-line", required=True, help="the probe built from cache_line.cc")
    parser.add_argument("--sumac", help="the sumac command; without it Gloo alone is measured")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes, multiples of 4")
    parser.add_argument("--json", action="store_true", help="one object a size instead of the table")
    return parser.parse_args(arguments)


def main():
    options = parse(sys.argv[1:])
    try:
        samples, line_ns = measure(options)
    except Failed as failure:
        print(f"compare: {failure}", file=sys.stderr)
        return 1
    table = summary(options, samples)
    if options.json:
        for row in table:
            print(json.dumps(row | {"ranks": options.ranks, "cache_line_ns": statistics.median(line_ns)}))
    else:
        print_table(options, table, line_ns)
    return 0


if __name__ == "__main__":
    sys.exit(main())

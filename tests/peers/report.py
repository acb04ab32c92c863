"""Prints a comparison: a table per number of ranks, then how times scale with ranks and bytes; or JSON."""

import json
import os
import statistics

import results as store

TITLE_WIDTH = 31
WIDTH = 10


class Names:
    """The measured series by role: Sumac's own, MPI's, and those with several variants."""

    def __init__(self, results, chosen):
        measured = results.series()
        self.own = [series.name for series in chosen if series.is_sumac and series.name in measured]
        self.mpi = [series.name for series in chosen if series.is_mpi and series.name in measured]
        self.several = {series.name for series in chosen if len(series.variants) > 1}
        self.same = {series.name: series.same for series in chosen if series.same and series.name in self.own}


def line(title, cells):
    return (f"{title:<{TITLE_WIDTH}}" + "".join(f"{cell:>{WIDTH}}" for cell in cells)).rstrip()


def us(value):
    """Format a time with the digits that are significant."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


def number(value):
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def short(variant):
    """Shorten a variant's name to the width of a column."""
    return variant.replace("recursive doubling", "rec.doubl.").replace("halving_doubling", "halving")[: WIDTH - 1]


def time_lines(results, ranks, names):
    sizes = results.sizes()
    for name in results.series():
        cells = [results.cell(ranks, name, size) for size in sizes]
        if not any(cells):
            continue
        yield line(results.titles[name], [us(cell and cell.time_us) for cell in cells])
        if name in names.several:
            yield line("  variant", [short(cell.variant) if cell else "-" for cell in cells])


def ratio_lines(results, ranks, names, others):
    """Yield, for each of Sumac's series, the time of the fastest of `others` divided by its own."""
    for name in names.own:
        ratios = []
        for size in results.sizes():
            best = results.best(ranks, others, size)
            ratios.append(store.ratio(results, ranks, size, best[1], name) if best else None)
        if any(ratios):
            yield line("  " + results.titles[name], [number(value) for value in ratios])


def same_lines(results, ranks, names):
    """Yield, for each of Sumac's schedules, the time of MPI's fastest with the same algorithm divided by its own."""
    for name, variant in names.same.items():
        best = [results.best(ranks, names.mpi, size, variant) for size in results.sizes()]
        pairs = zip(results.sizes(), best)
        ratios = [found and store.ratio(results, ranks, size, found[1], name) for size, found in pairs]
        marks = ["*" if is_replaced(variant, ranks, size) else "" for size in results.sizes()]
        if any(ratios):
            cells = [number(value) + mark * (value is not None) for value, mark in zip(ratios, marks)]
            yield line(f"  {results.titles[name].split(',')[0]}", cells)


def is_replaced(variant, ranks, size_bytes):
    """Return whether Open MPI takes another algorithm than it is told, for fewer f32 elements than ranks: recursive
    doubling for a ring, a linear one for Rabenseifner's (ompi/mca/coll/base/coll_base_allreduce.c)."""
    return variant in ("ring", "Rabenseifner") and size_bytes // 4 < ranks


def cpu_lines(results, ranks, names):
    best = [results.best(ranks, names.mpi, size) for size in results.sizes()]
    if any(best):
        yield line("  best MPI", [us(pair and pair[1].cpu_us) for pair in best])
    for name in names.own:
        cells = [results.cell(ranks, name, size) for size in results.sizes()]
        if any(cells):
            yield line("  " + results.titles[name], [us(cell and cell.cpu_us) for cell in cells])


def print_ranks(results, ranks, names, rounds):
    times = f"us, median of {rounds} round{'s' * (rounds > 1)}"
    print(f"\nall-reduce, f32 sum, {ranks} ranks on {os.cpu_count()} cores; {times}")
    print(line("", [store.size_name(size) for size in results.sizes()]))
    print("\n".join(time_lines(results, ranks, names)))
    if names.mpi:
        best = [results.best(ranks, names.mpi, size) for size in results.sizes()]
        print(line("best MPI", [pair[0] if pair else "-" for pair in best]))
    for title, others in (("best MPI", names.mpi), ("best Gloo", ["gloo"]), ("bare loop", ["bare"])):
        lines = list(ratio_lines(results, ranks, names, others))
        if lines:
            print(f"time of {title} / time of Sumac; above 1 Sumac is faster")
            print("\n".join(lines))
    lines = list(same_lines(results, ranks, names))
    if lines:
        print("time of MPI's same algorithm / time of Sumac; above 1 Sumac is faster; * MPI replaces it")
        print("\n".join(lines))
    lines = list(cpu_lines(results, ranks, names))
    if lines:
        print("CPU time per operation, maximum over ranks; Sumac's devices not included")
        print("\n".join(lines))


def print_exponents(results):
    """Print the exponent a of time ~ x^a for each series, over ranks and over bytes."""
    fits = {name: store.exponents(results, name) for name in results.series()}
    columns = list(next(iter(fits.values()), {}))
    columns = [column for column in columns if any(found[column] is not None for found in fits.values())]
    if not columns:
        return
    print("\nscaling exponents of the time: over ranks N at fixed size, and over bytes P >= 1 MiB at fixed N")
    heads = [f"N, {store.size_name(at)}" if over == "ranks" else f"P, N = {at}" for over, at in columns]
    print(line("", heads))
    for name, found in fits.items():
        print(line(results.titles[name], [number(found[column]) for column in columns]))


def print_text(results, chosen, notes, line_ns, rounds):
    trips = ", ".join(f"{ns:.0f}" for ns in line_ns)
    print(f"cache line round trip between cores 0 and 1: {statistics.median(line_ns):.0f} ns ({trips})")
    names = Names(results, chosen)
    for ranks in results.ranks():
        print_ranks(results, ranks, names, rounds)
    print_exponents(results)
    if notes:
        print()
    for note in notes:
        print(f"note: {note}")


def print_json(results, chosen, line_ns):
    """Print one object per number of ranks, size and series, then one per fitted exponent."""
    names = Names(results, chosen)
    for ranks, name, size in sorted(results.samples, key=lambda key: (key[0], key[2])):
        cell = results.cell(ranks, name, size)
        row = {"ranks": ranks, "size_bytes": size, "series": name, "variant": cell.variant or None}
        row |= {"time_us": cell.time_us, "cpu_us": cell.cpu_us, "rounds": cell.rounds}
        for key, others in (("mpi", names.mpi), ("gloo", ["gloo"]), ("bare", ["bare"])):
            best = results.best(ranks, others, size)
            if name in names.own and best:
                row[f"{key}_ratio"] = store.ratio(results, ranks, size, best[1], name)
        print(json.dumps(row | {"cache_line_ns": statistics.median(line_ns)}))
    for name in results.series():
        for (over, at), value in store.exponents(results, name).items():
            if value is not None:
                where = {"size_bytes": at} if over == "ranks" else {"ranks": at}
                print(json.dumps({"series": name, "exponent_over": over, "exponent": value} | where))

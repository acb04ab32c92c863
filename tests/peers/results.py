"""The samples of a comparison, their medians over rounds and variants, and the file they are stored in."""

import csv
import dataclasses
import math
import statistics

COLUMNS = ["ranks", "series", "variant", "size_bytes", "round", "time_us", "cpu_us", "iterations", "transport"]
COLUMNS += ["cache_line_ns"]
LARGE = 1 << 20
# Exponents over the number of ranks are fitted at this many of the largest sizes.
LARGEST = 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """One series at one number of ranks and one size: medians over the rounds, of its fastest variant."""

    time_us: float
    cpu_us: float | None
    variant: str
    rounds: int


class Results:
    def __init__(self):
        self.titles = {}
        # {(ranks, series, size): {variant: [one sample per round]}}; a sample is a dict with the keys of COLUMNS.
        self.samples = {}

    def add(self, sample):
        key = sample["ranks"], sample["series"], sample["size_bytes"]
        self.samples.setdefault(key, {}).setdefault(sample["variant"], []).append(sample)

    def all(self):
        return [sample for variants in self.samples.values() for found in variants.values() for sample in found]

    def cell(self, ranks, series, size, variant=None):
        """Return the medians of a variant, or of the fastest one; None if nothing was measured."""
        variants = self.samples.get((ranks, series, size), {})
        if variant is not None:
            variants = {name: found for name, found in variants.items() if name == variant}
        times = {variant: statistics.median(s["time_us"] for s in found) for variant, found in variants.items()}
        if not times:
            return None
        best = min(times, key=times.get)
        used = [sample["cpu_us"] for sample in variants[best] if sample["cpu_us"] is not None]
        return Cell(times[best], statistics.median(used) if used else None, best, len(variants[best]))

    def best(self, ranks, names, size, variant=None):
        """Return (series, cell) of the fastest of `names`, or None if none of them was measured."""
        found = [(name, self.cell(ranks, name, size, variant)) for name in names]
        return min((pair for pair in found if pair[1]), key=lambda pair: pair[1].time_us, default=None)

    def ranks(self):
        return sorted({key[0] for key in self.samples})

    def sizes(self):
        return sorted({key[2] for key in self.samples})

    def series(self):
        """Return the names of the measured series in the order of the titles."""
        measured = {key[1] for key in self.samples}
        return [name for name in self.titles if name in measured]


def ratio(results, ranks, size, other, series):
    """Return the time of `other` divided by that of `series`: above 1 the series is faster. None if one is missing."""
    own = results.cell(ranks, series, size)
    return other.time_us / own.time_us if other and own else None


def exponent(points):
    """Fit y = c x^a by least squares on the logarithms and return a, or None for fewer than two distinct x."""
    points = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if len({x for x, _ in points}) < 2:
        return None
    slope, _ = statistics.linear_regression(*zip(*points))
    return slope


def exponents(results, series):
    """Return {(over, at): exponent}: over ranks at each of the largest sizes, over large sizes at each rank count."""

    def time_us(ranks, size):
        cell = results.cell(ranks, series, size)
        return cell.time_us if cell else 0

    fits = {}
    for size in results.sizes()[-LARGEST:]:
        fits["ranks", size] = exponent([(ranks, time_us(ranks, size)) for ranks in results.ranks()])
    large = [size for size in results.sizes() if size >= LARGE]
    for ranks in results.ranks():
        fits["bytes", ranks] = exponent([(size, time_us(ranks, size)) for size in large])
    return fits


def write(results, notes, path):
    """Write all samples as tab-separated values after a header of '#' lines with the series' titles and the notes."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        for name, title in results.titles.items():
            file.write(f"# {name}: {title}\n")
        for note in notes:
            file.write(f"# note: {note}\n")
        table = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(results.all())


def read(path):
    """Read a file of `write`; the notes are skipped."""
    results = Results()
    with open(path, encoding="utf-8", newline="") as file:
        lines = file.read().splitlines()
    for line in lines:
        name, colon, title = line.removeprefix("# ").partition(": ")
        if line.startswith("# ") and colon and name != "note":
            results.titles[name] = title
    for row in csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t"):
        row |= {key: int(row[key]) for key in ("ranks", "size_bytes", "round")}
        row |= {key: float(row[key]) if row[key] else None for key in ("time_us", "cpu_us", "cache_line_ns")}
        results.add(row)
    return results


def size_name(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"

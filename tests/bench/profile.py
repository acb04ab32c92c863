"""Groups the lines of `perf report -F overhead,comm,sym` by kind of thread and kind of function."""

import re
import sys

THREADS = [
    ("ranks", re.compile(r"^sumac$")),
    ("device", re.compile(r"^shard-")),
    ("engine thread", re.compile(r"^dma-")),
    ("idle", re.compile(r"^swapper$")),
    ("others", re.compile(r"")),
]

# The first match counts.
FUNCTIONS = [
    ("moving and combining", re.compile(r"\[\.\].*(memmove|memcpy|reduce::)")),
    ("scheduler", re.compile(r"(sched|switch|futex|wake_up|halt|cpuidle|rseq|hrtimer|spin_unlock_irq|exit_to_user)")),
    ("kernel, other", re.compile(r"\[k\]")),
    ("own code", re.compile(r"\[\.\]")),
]


def first_match(table, text):
    return next(name for name, pattern in table if pattern.search(text))


def main():
    shares = {}
    for line in sys.stdin:
        found = re.match(r"\s*([\d.]+)%\s+(\S.*?)\s+(\[[.k]\]\s.*)", line)
        if found:
            key = first_match(THREADS, found[2]), first_match(FUNCTIONS, found[3])
            shares[key] = shares.get(key, 0.0) + float(found[1])
    names = [name for name, _ in FUNCTIONS]
    print(f"{'share of the cores, %':<22}" + "".join(f"{name:>22}" for name in names) + f"{'all':>8}")
    for thread, _ in THREADS:
        row = [shares.get((thread, function), 0.0) for function in names]
        if sum(row) >= 0.1:
            print(f"  {thread:<20}" + "".join(f"{share:>22.1f}" for share in row) + f"{sum(row):>8.1f}")


if __name__ == "__main__":
    main()

"""Sorts the lines of `perf report -F overhead,comm,sym` into who has the processor, and what for."""

import re
import sys

WHO = [
    ("ranks", re.compile(r"^sumac$")),
    ("device", re.compile(r"^shard-")),
    ("engine thread", re.compile(r"^dma-")),
    ("nobody", re.compile(r"^swapper$")),
    ("others", re.compile(r"")),
]

# The first that fits counts.
WHAT = [
    ("moving and combining", re.compile(r"\[\.\].*(memmove|memcpy|reduce::)")),
    ("scheduler", re.compile(r"(sched|switch|futex|wake_up|halt|cpuidle|rseq|hrtimer|spin_unlock_irq|exit_to_user)")),
    ("kernel, other", re.compile(r"\[k\]")),
    ("own code", re.compile(r"\[\.\]")),
]


def first(table, text):
    return next(name for name, pattern in table if pattern.search(text))


def main():
    shares = {}
    for line in sys.stdin:
        found = re.match(r"\s*([\d.]+)%\s+(\S.*?)\s+(\[[.k]\]\s.*)", line)
        if found:
            who, what = first(WHO, found[2]), first(WHAT, found[3])
            shares[who, what] = shares.get((who, what), 0.0) + float(found[1])
    names = [name for name, _ in WHAT]
    print(f"{'share of the cores, %':<22}" + "".join(f"{name:>22}" for name in names) + f"{'all':>8}")
    for who, _ in WHO:
        row = [shares.get((who, what), 0.0) for what in names]
        if sum(row) >= 0.1:
            print(f"  {who:<20}" + "".join(f"{share:>22.1f}" for share in row) + f"{sum(row):>8.1f}")


if __name__ == "__main__":
    main()

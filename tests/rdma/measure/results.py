"""What was measured: rows, hardware counters of each part, and how both are printed."""

import json
import re

# Counters of what goes wrong; the names are those of mlx5, rxe and the InfiniBand architecture.
SUSPICIOUS = re.compile(r"err|retr|drop|discard|out_of|timeout|nak|rnr|wait|cnp|ecn|adp|symbol|link_downed|dup")


class Skip(Exception):
    """This cannot be measured here, for this reason."""


class Results:
    def __init__(self):
        self.machines = {}
        self.rows = []
        self.counters = {}
        # How long each part has taken.
        self.seconds = {}

    def add(self, part, where, what, value=None, unit="", note=""):
        """Add a row that is right; `value` is a number, or None for a check."""
        self._add(part, where, what, "ok", value, unit, note)

    def skip(self, part, where, what, reason):
        self._add(part, where, what, "skipped", note=str(reason))

    def fail(self, part, where, what, reason):
        self._add(part, where, what, "FAILED", note=str(reason))

    def _add(self, part, where, what, status, value=None, unit="", note=""):
        row = dict(part=part, where=where, what=what, status=status, value=value, unit=unit, note=note)
        self.rows.append(row)
        print(line(row), flush=True)

    def count(self, status):
        return sum(row["status"] == status for row in self.rows)

    def value(self, part, where, what):
        """Return a measured number, or None."""
        found = [row["value"] for row in self.rows if (row["part"], row["where"], row["what"]) == (part, where, what)]
        return found[-1] if found else None

    def to_json(self):
        counts = {status.lower(): self.count(status) for status in ("ok", "skipped", "FAILED")}
        everything = dict(machines=self.machines, rows=self.rows, counters=self.counters, seconds=self.seconds, summary=counts)
        return json.dumps(everything, indent=1) + "\n"

    def to_table(self):
        """Return everything for people: machines, rows by part, counters that changed, and the summary."""
        text = []
        for label, facts in self.machines.items():
            text += [f"{label}: " + ", ".join(f"{name} {value}" for name, value in facts.items() if value != ""), ""]
        part = None
        for row in self.rows:
            if row["part"] != part:
                part = row["part"]
                text += ["", f"{part}"]
            text.append("  " + line(row))
        text += ["", "counters of errors and retransmissions that changed"]
        text += suspicious(self.counters) or ["  none"]
        if any(facts.get("soft") for facts in self.machines.values()):
            text += ["", "Soft-RoCE runs in the kernel: these rates and latencies say nothing about hardware"]
        text += ["", "seconds: " + ", ".join(f"{part} {seconds}" for part, seconds in self.seconds.items())]
        counts = f"{self.count('ok')} right, {self.count('skipped')} skipped, {self.count('FAILED')} failed"
        return "\n".join([*text, "", counts, ""])


def line(row):
    value = "" if row["value"] is None else f"{row['value']:,.3f}".rstrip("0").rstrip(".")
    note = f"  ({row['note']})" if row["note"] else ""
    return f"{row['status']:8}{row['where']:12}{row['what']:44}{value:>12} {row['unit']}{note}".rstrip()


def suspicious(counters):
    rows = []
    for part, machines in counters.items():
        for label, changes in machines.items():
            found = [f"{name} {change:+}" for name, change in changes.items() if SUSPICIOUS.search(name)]
            rows += [f"  {part}, {label}: {', '.join(found)}"] if found else []
    return rows

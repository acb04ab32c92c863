#!/usr/bin/env python3
"""Runs all test programs of the workspace, several in parallel, then the documentation's examples.

Usage: tests/side_by_side.py [--jobs N] [--without NAME]...

`cargo test` runs programs one after the other, although many mostly wait for timeouts and leases. This script runs N at
a time (by default one more than there are processors, at most five) and skips programs called NAME. A program's output
is printed when it has ended. All programs run, even if one fails; at the end, the failures are printed again, so that
the last lines of a log name them.

Exit status: 0 if all passed, 1 if something failed, 2 for wrong usage.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

# More than the slowest program needs on a slow machine.
LIMIT_S = 1200

JOBS_MAX = 64

# A failure's lines that are printed again at the end: the messages and the list of failed tests.
REPEATED_LINES = 60

# The programs that take longest, by their package's folder and name. One that started last would run alone.
LONGEST = [
    ("host", "sumac"), ("cli", "faults"), ("cli", "recovered"), ("cli", "update"), ("tests", "recovery"),
    ("hal", "sumac_hal"), ("cli", "resumed"), ("cli", "stopped"), ("cli", "perf"), ("bluefield", "sumac_agent"),
    ("tests", "goodput"),
]

# Packages whose programs start processes or take long, by folder.
FIRST = ["host", "cli", "tests"]


def programs(without):
    """Build all test programs; return each with the folder of its package, the longest first."""
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(1)
    found = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        is_program = message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]
        if is_program and message["target"]["name"] not in without:
            folder = Path(message["manifest_path"]).parent
            found.append((place(folder.name, message["target"]["name"]), Path(message["executable"]), folder))
    return [(program, folder) for _, program, folder in sorted(found)]


def place(folder, name):
    """Return the sort key of a program: the longest first.

    >>> some = [("hal", "sumac_hal"), ("cli", "run"), ("device", "a"), ("cli", "lossy"), ("host", "sumac")]
    >>> [name for _, _, name in sorted(place(*program) for program in some)]
    ['sumac', 'sumac_hal', 'lossy', 'run', 'a']
    """
    by_time = LONGEST.index((folder, name)) if (folder, name) in LONGEST else len(LONGEST)
    by_package = FIRST.index(folder) if folder in FIRST else len(FIRST)
    return by_time, by_package, name


def run(program, folder):
    """Run a test program as cargo does; return its exit status, output and duration in seconds."""
    began = time.monotonic()
    environment = dict(os.environ, CARGO_MANIFEST_DIR=str(folder))
    try:
        ran = subprocess.run(
            [program], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S,
        )
        status, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as late:
        status, output = f"none within {LIMIT_S} s", late.stdout or b""
    return status, output.decode(errors="replace"), time.monotonic() - began


def failure(output):
    """Return what a log's reader needs of a failed program's output: its failures, or its end where it has none."""
    _, mark, details = output.partition("\nfailures:\n")
    return details.splitlines()[-REPEATED_LINES:] if mark else output.splitlines()[-REPEATED_LINES:]


def jobs(text):
    """Parse the number of programs to run at a time."""
    if not (text.isdecimal() and 1 <= int(text) <= JOBS_MAX):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to {JOBS_MAX}")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=jobs, metavar="N", default=1 + min(os.cpu_count() or 1, 4))
    parser.add_argument("--without", action="append", metavar="NAME", default=[])
    arguments = parser.parse_args()
    failed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(run, *program): program for program in programs(arguments.without)}
        for ended in as_completed(running):
            program, (status, output, seconds) = running[ended][0], ended.result()
            print(f"\n     Ran {program.name} in {seconds:.1f} s\n{output}", flush=True)
            if status != 0:
                failed.append((f"{program.name} (exit status {status})", failure(output)))
    if subprocess.run(["cargo", "test", "--workspace", "--doc"]).returncode != 0:
        failed.append(("the documentation's examples", []))
    for name, lines in failed:
        print("\n".join([f"failed: {name}", *(f"    {line}" for line in lines)]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

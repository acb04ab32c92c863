#!/usr/bin/env python3
"""Run all test programs of the workspace, several in parallel, then the documentation's examples.

Usage: tests/side_by_side.py [--jobs N] [--without NAME]...

`cargo test` runs programs one after the other, though many mostly wait for timeouts and leases. This runs N at a time (by
default one more than there are processors, at most five) and skips those called NAME. The output of a program is printed
when it has ended. All programs run, even if one fails.

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

# Longer than any program takes on a slow machine.
LIMIT_S = 1200

MOST_JOBS = 64

# Folders of packages whose programs start processes, or take long.
FIRST = ["cli", "host", "tests"]


def programs(without):
    """Build all test programs; return each with the folder of its package, those of FIRST first."""
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(1)
    found = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        is_program = message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]
        if is_program and message["target"]["name"] not in without:
            found.append((Path(message["executable"]), Path(message["manifest_path"]).parent))
    # Start the longest programs first.
    place = {folder: number for number, folder in enumerate(FIRST)}
    return sorted(found, key=lambda program: (place.get(program[1].name, len(FIRST)), program[0].name))


def run(program, folder):
    """Run a test program as cargo does; return its exit status, what it printed and how long it took."""
    began = time.monotonic()
    environment = dict(os.environ, CARGO_MANIFEST_DIR=str(folder))
    try:
        ran = subprocess.run(
            [program], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S,
        )
        status, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as late:
        status, output = f"none in {LIMIT_S} s", late.stdout or b""
    return status, output.decode(errors="replace"), time.monotonic() - began


def jobs(text):
    """Read how many programs may run at a time."""
    if not (text.isdecimal() and 1 <= int(text) <= MOST_JOBS):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to {MOST_JOBS}")
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
                failed.append(f"{program.name} (exit status {status})")
    if subprocess.run(["cargo", "test", "--workspace", "--doc"]).returncode != 0:
        failed.append("the documentation's examples")
    for name in failed:
        print(f"failed: {name}")
    sys.exit(1 if failed else 0)


main()

#!/usr/bin/env python3
"""Builds, lists, verifies and extracts a stream with a 1 GiB image, and checks the peak memory of each command.

    tests/flash/memory.py SUMAC [--mib N]

Exit status 1 if any command's peak resident memory reaches LIMIT_MIB. The image is sparse if the file system supports
it; the stream is not.
"""

import argparse
import os
import pathlib
import sys
import tempfile

import bfb

LIMIT_MIB = 32


def peak_kib(command):
    """Run a command and return its peak resident memory in KiB."""
    quiet = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=quiet)
    _, status, usage = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{' '.join(command)}: status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sumac", help="the command")
    parser.add_argument("--mib", type=int, default=1024, help="length of the image")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        kernel, initramfs, out = folder / "kernel", folder / "initramfs", folder / "out.bfb"
        kernel.write_bytes(bfb.KERNEL_HEADER)
        with open(initramfs, "wb") as file:
            file.truncate(args.mib << 20)
        for command in (
            ["build", "--kernel", kernel, "--initramfs", initramfs, "-o", out],
            ["list", out],
            ["verify", out],
            ["repack", out, "--drop", "image", "-o", folder / "small.bfb"],
            ["extract", out, "-n", "image", "-o", folder],
        ):
            peak = peak_kib([args.sumac, "image", *map(str, command)])
            failed |= peak >= LIMIT_MIB << 10
            print(f"image {command[0]}, {args.mib} MiB: {peak / 1024:.1f} MiB resident, limit {LIMIT_MIB}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

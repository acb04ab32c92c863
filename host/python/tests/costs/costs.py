"""What an all-reduce costs in each layer, and with gloo and Open MPI: time and processor time of a call.

    python costs.py PROGRAM LIBRARIES [--ranks 2,4] [--rounds 7]

PROGRAM is the Rust program, tests/examples/costs.rs, and LIBRARIES the folder of sumac.h and libsumac.so:
host/capi/install's PREFIX. Prints a Markdown table. All rows sum floats in place, between processes of this machine.
Rows of Sumac are one job on a controller without devices, so that all take the same path, and their progress is a thread's
unless they say otherwise; `tree` is through one emulated device, by shared memory.

Each row runs once a round, in an order that changes from round to round, so that noise of the machine meets all rows alike. A
round's time is the median of its calls at the slowest rank; its processor time is the mean over the ranks of what a call
uses, of all threads of the process. The table has the median of the rounds, and the lowest and highest in parentheses. Noise
only adds time, so `adds` is the lowest round's difference from the lowest one of the row of Rust.

What this needs is skipped where it is missing: mpirun and mpi4py, torch.
"""

import argparse
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {8: 500, 64 << 20: 6}
"""Calls to time, by bytes."""
BASE = "Rust: `all_reduce`"


def timed(call, calls):
    """Return the median of the time that a call takes, and the processor time that it uses, in seconds."""
    for _ in range(calls // 10 + 1):
        call()
    seconds = []
    used = time.process_time()
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[calls // 2], (time.process_time() - used) / calls


def report(figures):
    """Print both figures, in one write: mpirun joins what the ranks print."""
    os.write(1, "{:.9f} {:.9f}\n".format(*figures).encode())


def as_python(count, calls):
    import numpy as np

    import sumac

    with sumac.init() as comm:
        x = np.zeros(count, dtype=np.float32)
        report(timed(lambda: comm.all_reduce(x), calls))


def as_torch(count, calls, backend="sumac"):
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=f"file://{os.environ['COSTS_STORE']}", rank=rank, world_size=size)
    x = torch.zeros(count)
    report(timed(lambda: dist.all_reduce(x), calls))
    dist.destroy_process_group()


def as_gloo(count, calls):
    as_torch(count, calls, "gloo")


def as_mpi(count, calls):
    import numpy as np
    from mpi4py import MPI

    x = np.zeros(count, dtype=np.float32)
    report(timed(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x), calls))


def figures(printed):
    """Return the time of the slowest rank, and the mean of the processor times."""
    times, used = zip(*(map(float, line.split()) for line in printed.splitlines()))
    return max(times), statistics.mean(used)


class Costs:
    """Runs a layer's ranks, and collects what they print."""

    def __init__(self, program, libraries, folder):
        self.rust, self.folder, self.c = str(program), folder, str(folder / "all_reduce")
        source = Path(__file__).with_name("all_reduce.c")
        flags = ["-std=c11", "-O2", f"-I{libraries}/include", f"-L{libraries}/lib", f"-Wl,-rpath,{libraries}/lib"]
        subprocess.run(["cc", *flags, source, "-o", self.c, "-lsumac"], check=True)

    def run(self, command, ranks, size, devices=0, progress="thread"):
        """Time a program as ranks of a job."""
        from sumac.testing import Cluster

        store = Path(tempfile.mktemp(dir=self.folder))
        with Cluster(ranks, devices=devices) as cluster:
            variables = cluster.environments()[0]
            env = {
                "SUMAC_CONTROLLER": f"{variables['MASTER_ADDR']}:{variables['SUMAC_PORT']}",
                "SUMAC_LOG": "off",
                "SUMAC_PROGRESS": progress,
                "COSTS_STORE": str(store),
                "OMP_NUM_THREADS": "1",
            }
            ended = cluster.run([*command, str(size // 4), str(SIZES[size])], env=env, timeout=300)
        for rank in ended:
            if rank.returncode != 0:
                raise RuntimeError(f"{command}: {rank.stdout}{rank.stderr}")
        return figures("".join(rank.stdout for rank in ended))

    def mpi(self, ranks, size):
        run = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *here("mpi")]
        command = [*run, str(size // 4), str(SIZES[size])]
        return figures(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def layers(self):
        """Return what runs each row, by its name, in the order of the table."""
        run = self.run
        layers = {
            "Rust: `all_reduce`, by its caller": lambda *case: run([self.rust], *case, progress="caller"),
            BASE: lambda *case: run([self.rust], *case),
            "C: `sumac_all_reduce`": lambda *case: run([self.c], *case),
            "Python: `comm.all_reduce`": lambda *case: run(here("python"), *case),
        }
        if importlib.util.find_spec("torch"):
            layers["torch: `dist.all_reduce` on `sumac`"] = lambda *case: run(here("torch"), *case)
            layers["torch: `dist.all_reduce` on `gloo`"] = lambda *case: run(here("gloo"), *case)
        if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
            layers["mpi4py: `Allreduce`, Open MPI"] = self.mpi
        layers["Rust, tree"] = lambda *case: run([self.rust], *case, devices=1)
        layers["Python, tree"] = lambda *case: run(here("python"), *case, devices=1)
        return layers


def here(layer):
    """Return the command that runs a function of this module."""
    return [sys.executable, "-P", __file__, "--rank", layer]


def spread(values, unit):
    """Return a table's cell: the median, the lowest and the highest.

    >>> spread([3e-6, 1e-6, 2.5e-5], 1e6), spread([0.1], 1e3)
    ('3.0 (1.0 to 25)', '100 (100 to 100)')
    """
    shown = [unit * value for value in (statistics.median(values), min(values), max(values))]
    return "{} ({} to {})".format(*(f"{value:.1f}" if value < 9.95 else f"{value:.0f}" for value in shown))


def cells(found, name, case):
    """Return a row's cells of a case: time, what it adds to Rust's, processor time."""
    unit = 1e6 if case[1] == 8 else 1e3
    times, used = zip(*found[name, case])
    adds = unit * (min(times) - min(found[BASE, case])[0])
    return [spread(times, unit), "" if name == BASE else f"{adds:.1f}", spread(used, unit)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("libraries", type=Path)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layers = Costs(args.program.resolve(), args.libraries.resolve(), Path(folder)).layers()
        cases = [(int(ranks), size) for ranks in args.ranks.split(",") for size in SIZES]
        found = {(name, case): [] for name in layers for case in cases}
        runs = list(found)
        for number in range(args.rounds):
            random.Random(number).shuffle(runs)
            for name, case in runs:
                found[name, case].append(layers[name](*case))
                print(number, name, *case, *found[name, case][-1], file=sys.stderr, flush=True)
    for ranks, size in cases:
        unit = "8 B: µs" if size == 8 else "64 MiB: ms"
        print(f"\n| {ranks} ranks, {unit} | time | adds | processor time |", "|---|---|---|---|", sep="\n")
        for name in layers:
            print("| " + " | ".join([name, *cells(found, name, (ranks, size))]) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        layer, count, calls = sys.argv[2:]
        {"python": as_python, "torch": as_torch, "gloo": as_gloo, "mpi": as_mpi}[layer](int(count), int(calls))
    else:
        main()

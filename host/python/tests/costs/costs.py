"""What an all-reduce costs in each layer, and with gloo and Open MPI: microseconds at 8 B, GB/s at 64 MiB.

    python costs.py SUMAC LIBRARIES [--ranks 2,4]

SUMAC is the command, and LIBRARIES the folder of sumac.h and libsumac.so: host/capi/install's PREFIX. Both and the wheel are
release builds. Prints a Markdown table. Each figure is the median of calls of the slowest rank, and the middle of three
runs, which take turns with those of the other rows. `x` is the time beside the Rust call's. All rows sum floats in place.
Rows of Sumac are one job on a controller without devices, so that all take the same path; `tree` is through one emulated
device of this machine, by shared memory.

What this needs is skipped where it is missing: mpirun and mpi4py, torch.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {8: 500, 64 << 20: 8}
"""Calls to time, by bytes."""
ROUNDS = 3


def timed(call, calls):
    """Return the median of the time that a call takes, in seconds."""
    warmup = calls // 10 + 1
    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def report(seconds):
    """Print a figure, in one write: mpirun joins what the ranks print."""
    os.write(1, f"{seconds:.9f}\n".encode())


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


class Costs:
    """Runs a layer's ranks, and collects what they print."""

    def __init__(self, sumac, libraries, folder):
        self.sumac, self.libraries, self.folder = sumac, libraries, folder
        self.program = folder / "all_reduce"
        source = Path(__file__).with_name("all_reduce.c")
        flags = ["-std=c11", "-O2", f"-I{libraries}/include", f"-L{libraries}/lib", f"-Wl,-rpath,{libraries}/lib"]
        subprocess.run(["cc", *flags, source, "-o", self.program, "-lsumac"], check=True)

    def ranks(self, ranks, command, devices):
        """Run a command as ranks of a job, and return what each prints."""
        from sumac.testing import Cluster

        store = Path(tempfile.mktemp(dir=self.folder))
        with Cluster(ranks, devices=devices) as cluster:
            variables = cluster.environments()[0]
            env = {
                "SUMAC_CONTROLLER": f"{variables['MASTER_ADDR']}:{variables['SUMAC_PORT']}",
                "SUMAC_LOG": "off",
                "COSTS_STORE": str(store),
                "OMP_NUM_THREADS": "1",
            }
            ended = cluster.run(command, env=env, timeout=300)
        for rank in ended:
            if rank.returncode != 0:
                raise RuntimeError(f"{command}: {rank.stdout}{rank.stderr}")
        return [rank.stdout for rank in ended]

    def perf(self, ranks, size, devices):
        """Time the Rust call with the command, which measures as these programs do."""
        algo = ["--algo", "tree" if devices else "auto"]
        calls = ["-b", str(size), "-e", str(size), "-n", str(SIZES[size]), "--buffers", "in-place", "-c", "ends"]
        printed = self.ranks(ranks, [self.sumac, "perf", "--json", "--quiet", *algo, *calls], devices)
        rows = [json.loads(line) for line in "".join(printed).splitlines() if line.startswith("{")]
        return rows[0]["time_us"] / 1e6

    def here(self, layer, ranks, size, devices=0):
        """Time a function of this module."""
        command = [sys.executable, "-P", __file__, "--rank", layer, str(size // 4), str(SIZES[size])]
        if layer == "mpi":
            run = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *command]
            return max(map(float, subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()))
        return max(map(float, self.ranks(ranks, command, devices)))

    def compiled(self, ranks, size, devices=0):
        """Time the C program."""
        return max(map(float, self.ranks(ranks, [str(self.program), str(size // 4), str(SIZES[size])], devices)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sumac")
    parser.add_argument("libraries", type=Path)
    parser.add_argument("--ranks", default="2,4")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = Costs(args.sumac, args.libraries, Path(folder))
        layers = {
            "Rust: `sumac perf`": lambda ranks, size: costs.perf(ranks, size, 0),
            "C: `sumac_all_reduce`": costs.compiled,
            "Python: `comm.all_reduce`": lambda ranks, size: costs.here("python", ranks, size),
            "torch: `dist.all_reduce` on `sumac`": lambda ranks, size: costs.here("torch", ranks, size),
            "torch: `dist.all_reduce` on `gloo`": lambda ranks, size: costs.here("gloo", ranks, size),
            "mpi4py: `Allreduce`, Open MPI": lambda ranks, size: costs.here("mpi", ranks, size),
            "Rust, tree": lambda ranks, size: costs.perf(ranks, size, 1),
            "torch on `sumac`, tree": lambda ranks, size: costs.here("torch", ranks, size, 1),
        }
        if shutil.which("mpirun") is None:
            del layers["mpi4py: `Allreduce`, Open MPI"]
        cases = [(int(ranks), size) for ranks in args.ranks.split(",") for size in SIZES]
        found = {}
        for _ in range(ROUNDS):
            for name, run in layers.items():
                for case in cases:
                    found.setdefault((name, case), []).append(run(*case))
                    print(name, *case, found[name, case][-1], file=sys.stderr, flush=True)
    heads = [f"{ranks} ranks, {'8 B: µs' if size == 8 else '64 MiB: GB/s'} | x" for ranks, size in cases]
    print("| | " + " | ".join(heads) + " |", "|---" + "|---|---" * len(cases) + "|", sep="\n")
    first = next(iter(layers))
    for name in layers:
        cells = [name]
        for case in cases:
            seconds = statistics.median(found[name, case])
            micros = f"{1e6 * seconds:.3g}" if seconds < 1e-3 else f"{1e6 * seconds:.0f}"
            cells.append(micros if case[1] == 8 else f"{case[1] / seconds / 1e9:.2f}")
            cells.append(f"{seconds / statistics.median(found[first, case]):.2g}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        layer, count, calls = sys.argv[2:]
        {"python": as_python, "torch": as_torch, "gloo": as_gloo, "mpi": as_mpi}[layer](int(count), int(calls))
    else:
        main()

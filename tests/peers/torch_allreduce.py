#!/usr/bin/env python3
"""PyTorch's all-reduce with its gloo backend, timed for comparison with Sumac's.

    torch_allreduce.py RANKS SIZE_BYTES...        f32 sum, in place, one process a rank, loopback interface
    torch_allreduce.py --version

Measures like mpi_allreduce and prints the same objects; see there.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time

# One thread per rank, like the others. Both variables are read when the module is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

WARM_UP_OPS = 4
WARM_UP_S = 0.05
BUDGET_S = 0.2
ITERATIONS_MIN, ITERATIONS_MAX = 5, 20000
CPU_ITERATIONS_MIN = 3


def check(rank, ranks, count):
    """Check every element of one operation. The inputs are small integers, whose sums f32 represents exactly."""
    pattern = ((torch.arange(count) * 7 + 3) % 1009).float()
    data = pattern * (rank + 1)
    dist.all_reduce(data)
    wrong = int((data != pattern * (ranks * (ranks + 1) // 2)).sum())
    if wrong:
        raise SystemExit(f"torch_allreduce: rank {rank}: {wrong} of {count} elements are wrong")


def warm_up(data):
    """Run for at least WARM_UP_S; return the number of iterations that fit into the budget, as rank 0 estimates it."""
    start, done = time.perf_counter(), 0
    agreed = torch.zeros(1)
    while agreed.item() == 0:
        for _ in range(WARM_UP_OPS):
            dist.all_reduce(data)
        done += WARM_UP_OPS
        took = time.perf_counter() - start
        if took > WARM_UP_S:
            agreed[0] = max(ITERATIONS_MIN, min(ITERATIONS_MAX, int(BUDGET_S * done / took)))
        dist.broadcast(agreed, 0)
    return int(agreed.item())


def time_each(data, iterations, clock):
    """Time each of `iterations` operations with `clock`; return microseconds."""
    times = torch.zeros(iterations, dtype=torch.float64)
    for i in range(iterations):
        dist.barrier()
        start = clock()
        dist.all_reduce(data)
        times[i] = (clock() - start) * 1e6
    return times


def measure(rank, ranks, size_bytes):
    check(rank, ranks, size_bytes // 4)
    # Zeros stay finite over any number of in-place operations.
    data = torch.zeros(size_bytes // 4)
    iterations = warm_up(data)
    times = time_each(data, iterations, time.perf_counter)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    cpu = time_each(data, max(CPU_ITERATIONS_MIN, iterations // 4), time.process_time).mean().reshape(1)
    dist.all_reduce(cpu, op=dist.ReduceOp.MAX)
    if rank == 0:
        slowest = sorted(times.tolist())
        row = {"ranks": ranks, "size_bytes": size_bytes, "iterations": iterations}
        row |= {"time_us": slowest[iterations // 2], "p99_us": slowest[iterations * 99 // 100], "cpu_us": cpu.item()}
        print(json.dumps(row), flush=True)


def run_rank(rank, ranks, sizes, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for size_bytes in sizes:
        measure(rank, ranks, size_bytes)
    dist.barrier()
    dist.destroy_process_group()


def main():
    if sys.argv[1:] == ["--version"]:
        print(f"PyTorch {torch.__version__}")
        return 0
    if len(sys.argv) < 3 or not all(argument.isdigit() for argument in sys.argv[1:]):
        print("usage: torch_allreduce.py RANKS SIZE_BYTES(multiple of 4)...", file=sys.stderr)
        return 2
    ranks, *sizes = map(int, sys.argv[1:])
    # Forked, because loading the library in each rank would take longer than the measurement.
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = []
        for rank in range(ranks):
            processes.append(fork.Process(target=run_rank, args=(rank, ranks, sizes, store), daemon=True))
            processes[-1].start()
        running = list(processes)
        while running:
            multiprocessing.connection.wait([process.sentinel for process in running])
            # Once one rank fails, kill the others, which would block forever.
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
            running = [process for process in running if process.exitcode is None]
    return int(any(process.exitcode != 0 for process in processes))


if __name__ == "__main__":
    sys.exit(main())

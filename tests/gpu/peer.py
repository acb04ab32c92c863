#!/usr/bin/env python3
"""Prints the throughput of PyTorch's elementwise sum at 256 MiB, in the columns of `gpu measure`."""

import statistics

import torch

LEN_BYTES = 256 << 20
ROUNDS = 21


def seconds(body):
    """Return the median time of the work that `body` enqueues on the current stream, measured with GPU events."""
    body()
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main():
    print(f"\n| PyTorch {torch.__version__}, 256 MiB | us | GB/s moved | of its copy |\n|---|---|---|---|")
    copy_rate = None
    for dtype in (torch.float32, torch.bfloat16):
        count = LEN_BYTES // torch.empty((), dtype=dtype).element_size()
        a, b, out = (torch.zeros(count, dtype=dtype, device="cuda") for _ in range(3))
        if copy_rate is None:
            time = seconds(lambda: out.copy_(a))
            copy_rate = 2 * LEN_BYTES / time
            print(f"| copy | {time * 1e6:.1f} | {copy_rate / 1e9:.0f} | 100 % |")
        time = seconds(lambda: torch.add(a, b, out=out))
        rate = 3 * LEN_BYTES / time
        print(f"| add {str(dtype).removeprefix('torch.')} | {time * 1e6:.1f} | {rate / 1e9:.0f} | {rate / copy_rate * 100:.1f} % |")


if __name__ == "__main__":
    main()

"""Prints the mean of a column over the files of all ranks."""

import sys

import numpy as np
import sumac


def mean(comm: sumac.Communicator, values: np.ndarray) -> float:
    totals = np.array([values.sum(), values.size], "f8")
    comm.all_reduce(totals)
    return totals[0] / totals[1]


if __name__ == "__main__":
    with sumac.init() as comm:
        result = mean(comm, np.loadtxt(sys.argv[1 + comm.rank], ndmin=1))
        if comm.rank == 0:
            print(result)

"""Every line of the guide's table of dialects: the three columns leave the same in their arrays, rank by rank."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from conftest import command

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]


def lines(column):
    """Return a column of the table, mpi4py's first."""
    section = GUIDE.read_text().split("\n## Two dialects\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 20 and all(len(row) == 3 for row in rows)
    return [row[column].strip("`") for row in rows]


def arrays(rank, size):
    n = 3
    a, b = np.arange(n) + 10.0 * rank, np.zeros(n)
    v, w = np.arange(n * size) + 100.0 * rank, np.zeros(n * size)
    return {"a": a, "b": b, "v": v, "w": w, "counts": [n] * size, "peer": (rank + 1) % size}


def run_column(column, folder=None):
    """Run a column's lines, each on new arrays unless it goes on with a request or a message."""
    names = {}
    if column == 0:
        from mpi4py import MPI

        names["MPI"] = MPI
    else:
        import sumac

        names["sumac"] = sumac
    found = []
    for line in lines(column):
        goes_on = line.startswith(("done", "request.", "MPI.Request", "sumac.wait_all", "if rank == 1"))
        if "rank" in names and not goes_on:
            names |= arrays(names["rank"], names["size"])
        exec(line, names)
        # Arrays of operations that go on are looked at when they have ended.
        if "a" in names and not line.startswith(("request", "done")):
            found.append([names[name].tolist() for name in "abvw"])
    if folder is None:
        print(json.dumps(found))
    else:
        # Not printed: `mpirun` breaks long lines.
        Path(folder, str(names["rank"])).write_text(json.dumps(found))


def mpi4py(folder):
    if shutil.which("mpirun") is None:
        skip = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        skip("mpirun is not installed; Debian: apt-get install openmpi-bin")
    ended = subprocess.run([*MPIRUN, *command(run_column, 0, str(folder))], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / rank).read_text()) for rank in "01"]


@pytest.mark.parametrize("devices", [1, 0])
def test_columns_of_the_table_compute_the_same(run_ranks, devices):
    ended = (run_ranks(run_column, column, devices=devices) for column in (1, 2))
    named, own = ([json.loads(rank.stdout) for rank in ranks] for ranks in ended)
    assert named == own and named[0] != named[1]
    assert any(b != [0, 0, 0] for _, b, _, _ in own[0])


def test_table_computes_what_mpi4py_does(run_ranks, tmp_path):
    assert [json.loads(rank.stdout) for rank in run_ranks(run_column, 2)] == mpi4py(tmp_path)

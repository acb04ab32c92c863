"""The guide's table for programs that use gloo: every line runs, with gloo and with Sumac."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "python.md"


def lines(column):
    """Return the Python code of a column of the table, in order."""
    text = GUIDE.read_text().split("### From gloo and nccl")[1].split("###")[0]
    rows = [re.split(r" \| ", row.strip("| ")) for row in text.splitlines() if row.startswith("| `")]
    cells = [code for row in rows for code in re.findall(r"`([^`]*)`", row[column])[:1]]
    # Variables and commands of the shell.
    return [code for code in cells if not re.match(r"[A-Z_]+=|torchrun ", code)]


def run_lines(column):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import sumac.torch

    names = {
        "torch": torch, "dist": dist, "nn": nn, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard,
        "DistributedDataParallel": DistributedDataParallel, "sumac": sumac, "x": torch.ones(4), "meet": meet,
    }
    ended = ("sumac", "gloo")[column == 0]
    for code in lines(column):
        # The fixture has made a group, as rank 0 and 1 of a store; a program makes one.
        if "init_process_group" in code:
            assert ended in code
            code = code.replace(")", ", **meet())")
            dist.destroy_process_group()
        exec(code, names)  # noqa: S102
        if "is_completed" in code:
            assert eval(code, names)  # noqa: S307
        if code.startswith("model"):
            names["model"](torch.ones(2, 4)).sum().backward()
    assert not dist.is_initialized()


def meet(calls=[]):  # noqa: B006
    """Return what init_process_group takes from torchrun's variables, with a new store for each call."""
    import os

    calls.append(None)
    store = f"file://{os.environ['SUMAC_TEST_STORE']}-{len(calls)}"
    return {"init_method": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


@pytest.mark.parametrize("column", [0, 2])
def test_each_line_of_the_table_runs(run_ranks, adapter, column):
    assert len(lines(column)) > 10
    run_ranks(run_lines, column, adapter=adapter)

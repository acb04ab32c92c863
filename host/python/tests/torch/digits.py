"""A program for torchrun: train scikit-learn's digits, data-parallel and sharded, on the backends that it is told.

    torchrun --nproc-per-node=2 digits.py DATA.pt FOLDER BACKEND...

Each rank writes losses and parameters to FOLDER/RANK.pt, by strategy and backend, and the paths that the operations of the
backend sumac took. In the middle of the second epoch on sumac, the ranks report to the store of the test, if there is one
(SUMAC_TEST_STORE, host:port), and wait for its answer.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

EPOCHS, BATCH = 4, 128
"""Passes over the data, and digits of a step, over all ranks."""


def data_parallel(model, group):
    # Buckets so small that there are several.
    return nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)


def sharded(model, group):
    # torch's caches tell meshes apart by their names, not by their groups.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


STRATEGIES = (data_parallel, sharded)


def train(wrap, group, images, labels, in_mid_epoch):
    """Train on this rank's part of each batch. Return the loss of each step, and the parameters."""
    torch.manual_seed(7)
    model = wrap(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10)), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(11)
    losses = []
    for epoch in range(EPOCHS):
        batches = torch.randperm(len(images), generator=generator).split(BATCH)[:-1]
        for step, batch in enumerate(batches):
            if (epoch, step) == (1, len(batches) // 2):
                in_mid_epoch()
            mine = batch.chunk(group.size())[group.rank()]
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    parameters = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters())
    return torch.tensor(losses), [each.detach().clone() for each in parameters]


def recorded_operations():
    """Return a list to which each operation that the backend sumac starts adds its name and its requests."""
    from sumac.torch.work import SumacWork

    operations, init = [], SumacWork.__init__

    def recorded(work, what, rank, requests, *arguments):
        operations.append((what, requests))
        init(work, what, rank, requests, *arguments)

    SumacWork.__init__ = recorded
    return operations


def main(data, folder, *backends):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    images, labels = torch.load(data)
    operations, store = recorded_operations(), None
    if "SUMAC_TEST_STORE" in os.environ:
        host, port = os.environ["SUMAC_TEST_STORE"].split(":")
        store = dist.TCPStore(host, int(port), is_master=False)
    found = {}
    for backend in backends:
        for strategy in STRATEGIES:
            # Each on a job of its own: one that has lost a device may go on without a tree.
            name, group = strategy.__name__, dist.new_group(backend=backend)

            def in_mid_epoch(name=name, backend=backend):
                if store is not None and backend == "sumac":
                    store.set(f"{name}/{rank}", "in mid-epoch")
                    store.wait([f"{name}/go"])

            found[f"{name} {backend}"] = train(strategy, group, images, labels, in_mid_epoch)
            dist.destroy_process_group(group)
    paths = Counter((what, request.wait().path) for what, requests in operations for request in requests)
    torch.save((found, dict(paths)), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

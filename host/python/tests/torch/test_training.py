"""Training: DistributedDataParallel and fully_shard give gloo's results, with torchrun, and on a tree of devices."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from sumac.testing import Cluster

HERE = Path(__file__).parent


def model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def train(wrap, steps=6):
    """Train on this rank's part of the data, and return losses and parameters."""
    wrapped = wrap(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        x = torch.randn(16, 8, generator=generator)
        loss = nn.functional.cross_entropy(wrapped(x), (x[:, 0] > 0).long() + (x[:, 1] > 1).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in wrapped.parameters()]
    return losses, [each.detach().clone() for each in parameters]


def compare(wrap_in):
    losses, parameters = train(lambda model: wrap_in(model, None))
    expected, theirs = train(lambda model: wrap_in(model, dist.new_group(backend="gloo")))
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for ours, their in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(ours, their, rtol=1e-5, atol=1e-6)


def data_parallel():
    # Buckets so small that there are several.
    compare(lambda model, group: nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01))


def sharded():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def wrap(model, group):
        mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    compare(wrap)


def on_a_tree():
    import sumac.torch

    assert sumac.torch.explain().chosen == "tree"
    x = sumac.torch.empty(1 << 16)
    x += 1
    outcome = sumac.torch.communicator().all_reduce(x)
    assert (x == dist.get_world_size()).all() and (outcome.path, outcome.transfer) == ("tree", "zero-copy")
    data_parallel()


def test_data_parallel_training_equals_that_with_gloo(run_ranks):
    run_ranks(data_parallel)


def test_sharded_training_equals_that_with_gloo(run_ranks):
    run_ranks(sharded)


def test_training_through_a_tree_of_devices_equals_that_with_gloo(run_ranks):
    with Cluster(2) as cluster:
        variables = cluster.environments()[0]
        address = f"{variables['MASTER_ADDR']}:{variables['SUMAC_PORT']}"
        env = {"SUMAC_CONTROLLER": address, "SUMAC_KEY_FILE": variables["SUMAC_KEY_FILE"]}
        run_ranks(on_a_tree, env=env)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Write scikit-learn's digits to a file: 1797 images of 64 pixels, and their labels."""
    images, labels = load_digits(return_X_y=True)
    path = tmp_path_factory.mktemp("digits") / "digits.pt"
    torch.save((torch.from_numpy(images).float() / 16, torch.from_numpy(labels)), path)
    return path


def torchrun(program, *arguments, ranks, env=None, beside=lambda: None, options=()):
    """Run a program by torchrun, and return what it prints."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "SUMAC_LOG": "off", **(env or {})}
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, program, *arguments], env=own, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            beside()
            out, error = running.communicate(timeout=120)
        except BaseException:
            running.kill()
            raise
    assert running.returncode == 0, out + error
    return out


def train_digits(digits, folder, ranks, *backends, kills=False):
    """Train by torchrun through a two-level tree of devices; if asked to, kill a device in mid-epoch, with each strategy.

    Return what each rank has saved: losses and parameters by strategy and backend, and operations by name and path.
    """
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Cluster(ranks, levels=2, devices=5) as cluster:

        def beside():
            for strategy in ("data_parallel", "sharded"):
                store.wait([f"{strategy}/{rank}" for rank in range(ranks)], datetime.timedelta(seconds=60))
                devices = cluster.devices_in_use()
                if kills:
                    cluster.kill_device(devices[0])
                else:
                    assert len(devices) == 3, devices
                store.set(f"{strategy}/go", "")

        variables = cluster.environments()[0]
        env = {
            "SUMAC_CONTROLLER": f"{variables['MASTER_ADDR']}:{variables['SUMAC_PORT']}",
            "SUMAC_KEY_FILE": variables["SUMAC_KEY_FILE"],
            "SUMAC_ORDER": "pairwise",
            "SUMAC_TEST_STORE": f"127.0.0.1:{store.port}",
        }
        program, arguments = str(HERE / "digits.py"), (str(digits), str(folder), *backends)
        torchrun(program, *arguments, ranks=ranks, env=env, beside=beside)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_digits_train_through_a_tree_as_with_gloo_and_to_the_same_bits_when_devices_are_killed(digits, tmp_path, ranks):
    whole = train_digits(digits, tmp_path / "whole", ranks, "sumac", "gloo")
    killed = train_digits(digits, tmp_path / "killed", ranks, "sumac", kills=True)
    for (found, paths), (again, _) in zip(whole, killed, strict=True):
        assert {path for _, path in paths} == {"tree"}, paths
        for strategy in ("data_parallel", "sharded"):
            losses, parameters = found[f"{strategy} sumac"]
            # Ten digits: an untrained model's loss is ln 10.
            assert losses[0] > 2.2 and losses[-10:].mean() < 0.5
            torch.testing.assert_close((losses, parameters), found[f"{strategy} gloo"], rtol=1e-4, atol=1e-5)
            others, their = again[f"{strategy} sumac"]
            assert torch.equal(losses, others)
            assert all(torch.equal(one, other) for one, other in zip(parameters, their, strict=True))


PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("cpu:sumac")
rank, restarts = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
x = torch.ones(3)
dist.all_reduce(x)
if restarts == "0" and rank == 1:
    os._exit(1)
dist.barrier()
os.write(1, f"rank {rank} after {restarts} restarts: {x[0]}\\n".encode())
dist.destroy_process_group()
"""


def test_torchrun_restarts_as_a_new_job(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out = torchrun(str(program), ranks=2, options=["--max-restarts=1"])
    assert sorted(out.split("\n")[:-1]) == [f"rank {rank} after 1 restarts: 2.0" for rank in range(2)]

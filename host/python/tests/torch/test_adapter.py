"""The adapter in C++: what works of c10d tell with it, and all else as without it."""

import datetime
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from test_operations import aborted, groups, late, mismatched, movements, reductions, timed_out


def build(folder, **env):
    command = [sys.executable, "-P", "-m", "sumac.torch", "build"]
    return subprocess.run(
        command, env={**os.environ, "SUMAC_TORCH_ADAPTER": str(folder), **env}, capture_output=True, text=True
    )


def told():
    import sumac.torch

    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(group).__name__ == "Backend" and sumac.torch.backend() is group.inner
    explanation = sumac.torch.explain()
    assert explanation.adapter == f"built for torch {torch.__version__}" and explanation.adapter in str(explanation)

    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(1000)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed() and work.exception() is None, "rank 1 has not called it"
        store.set("go", "")
    else:
        store.wait(["go"])
        work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    assert work.is_success() and work.wait() and (x == size).all()
    assert [each.data_ptr() for each in work.result()] == [x.data_ptr()]

    # Each rank but 0 sends its number; rank 0 learns who sent.
    if rank != 0:
        dist.send(torch.full((3,), float(rank)), 0, tag=4)
    else:
        sources = set()
        for _ in range(1, size):
            source = dist.recv(x[:3], tag=4)
            assert (x[:3] == source).all()
            sources.add(source)
        assert sources == set(range(1, size))
        work = dist.irecv(x[:3], tag=5)
    if rank == 1:
        dist.send(torch.ones(3), 0, tag=5)
    if rank == 0:
        work.wait()
        assert work._source_rank() == 1

    y = group.allocate_tensor(6, dtype=torch.int64, device=torch.device("cpu"))
    assert group.supports_tensor_alloc(torch.device("cpu")) and y.tolist() == [0] * 6 and y.dtype == torch.int64
    assert not group.supports_tensor_alloc(torch.device("cuda:0"))
    with pytest.raises(NotImplementedError, match="allocate_tensor on cuda:0"):
        group.allocate_tensor(6, dtype=torch.int64, device=torch.device("cuda:0"))
    y += rank
    dist.all_reduce(y)
    assert y.tolist() == [size * (size - 1) // 2] * 6

    half = dist.split_group(split_ranks=[[0, 1], [2]])
    if rank < 2:
        dist.all_reduce(x, group=half)
        assert type(half._get_backend(torch.device("cpu"))).__name__ == "Backend"


def failed():
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        while not work.is_completed():
            pass
        assert not work.is_success()
        with pytest.raises(dist.DistBackendError, match="rank 0: all_reduce: its timeout has passed"):
            work.wait()
        assert "its timeout has passed" in str(work.exception())
        store.set("go", "")
    store.wait(["go"])


def test_work_tells_completion_source_and_result(run_ranks, adapter):
    run_ranks(told, ranks=3, adapter=adapter)


def test_failed_work_is_completed_and_tells_its_error(run_ranks, adapter):
    run_ranks(failed, adapter=adapter)


@pytest.mark.parametrize("function", [reductions, movements, groups, mismatched, late, timed_out, aborted])
def test_operations_do_what_they_do_without_the_adapter(run_ranks, adapter, function):
    run_ranks(function, ranks=3 if function in (movements, groups) else 2, adapter=adapter)


def test_broken_adapter_is_not_taken_and_named(tmp_path, monkeypatch):
    from sumac.torch import adapter

    monkeypatch.setenv(adapter.SETTING, str(tmp_path))
    adapter.path().write_bytes(b"no library")
    module, status = adapter.load.__wrapped__()
    assert module is None and "cannot be loaded, build it again by python -m sumac.torch build" in status


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_adapter_of_another_user_is_not_taken(tmp_path, monkeypatch):
    from sumac.torch import adapter

    monkeypatch.setenv(adapter.SETTING, str(tmp_path))
    adapter.path().write_bytes(b"theirs")
    os.chown(adapter.path(), 65534, 65534)
    module, status = adapter.load.__wrapped__()
    assert module is None and "belongs to user 65534" in status


def test_build_that_fails_names_the_cause_and_leaves_nothing(tmp_path):
    for env, why in [({"CXX": "no-compiler"}, "CXX names a compiler"), ({"CXX": "c++ -DTORCH_STABLE_ONLY"}, "status 1")]:
        ended = build(tmp_path, **env)
        assert ended.returncode == 1 and why in ended.stderr, ended.stderr
    assert list(tmp_path.iterdir()) == []
    ended = build("/proc/none")
    assert ended.returncode == 1 and "/proc/none cannot be written" in ended.stderr, ended.stderr

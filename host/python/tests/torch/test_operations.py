"""Each operation of c10d on this backend gives what gloo gives."""

import datetime
import importlib
import os

import pytest
import torch
import torch.distributed as dist

ops = dist.ReduceOp


def both(operation):
    """Run an operation on both backends and compare what it returns."""
    found = operation(None)
    expected = operation(gloo())
    flat = torch.utils._pytree.tree_leaves
    for ours, theirs in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(ours, theirs)


def gloo(groups={}):  # noqa: B006
    if "gloo" not in groups:
        groups["gloo"] = dist.new_group(backend="gloo")
    return groups["gloo"]


def values(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def reductions():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX):
            def all_reduce(group, dtype=dtype, op=op):
                x = values(3, 5, dtype=dtype)
                dist.all_reduce(x, op, group=group)
                return x
            both(all_reduce)
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        def bits(group, op=op):
            x = values(9, dtype=torch.int32)
            dist.all_reduce(x, op, group=group)
            return x
        both(bits)

    def complex_sum(group):
        x = torch.complex(values(4), values(4, seed=1))
        dist.all_reduce(x, group=group)
        return x
    both(complex_sum)

    x = torch.tensor([rank == 0, rank >= 0, False])
    dist.all_reduce(x)
    assert x.tolist() == [True, True, False] and x.dtype == torch.bool
    dist.all_reduce(x, ops.MIN)
    assert x.tolist() == [True, True, False]
    x = torch.full((4,), float(rank))
    dist.all_reduce(x, ops.AVG)
    assert (x == (size - 1) / 2).all()
    x = torch.full((4,), 1.0)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert (x == 0.5 * size).all()

    # gloo reduces other elements of strided tensors.
    x = torch.ones(4, 6)
    dist.all_reduce(x[:, 1::2])
    assert (x[:, 1::2] == size).all() and (x[:, ::2] == 1).all()
    x = torch.ones(4, 6)
    dist.all_reduce(x.t()[2])
    assert (x[:, 2] == size).all() and x.sum() == 20 + 4 * size

    # Rank 0 has no element, and others share some.
    x = torch.zeros(4, 3)
    x[:rank] = rank
    sparse = x.to_sparse(1)
    work = dist.all_reduce(sparse, async_op=True)
    work.get_future().wait()
    expected = sum(torch.where(torch.arange(4)[:, None] < r, float(r), 0.0).expand(4, 3) for r in range(size))
    assert torch.equal(sparse.to_dense(), expected)

    def reduce(group):
        x = values(7, 2).t()
        before = x.clone()
        dist.reduce(x, 1, group=group)
        # gloo may change the tensor of other ranks.
        return x if rank == 1 else before
    both(reduce)
    x = values(3)
    before = x.clone()
    dist.reduce(x, (rank + 1) % size if size == 1 else 0)
    assert rank == 0 or (x == before).all()

    def reduce_scatter(group):
        out = torch.empty(2, 3)
        dist.reduce_scatter(out, [values(2, 3, seed=i) for i in range(size)], group=group)
        return out
    both(reduce_scatter)
    uneven = torch.empty(rank + 1)
    dist.reduce_scatter(uneven, [torch.full((i + 1,), float(i)) for i in range(size)])
    assert (uneven == rank * size).all()

    def reduce_scatter_tensor(group):
        out = torch.empty(3)
        dist.reduce_scatter_tensor(out, values(3 * size), group=group)
        return out
    both(reduce_scatter_tensor)

    def coalesced(group):
        xs = [values(5, seed=i) for i in range(3)]
        with dist._coalescing_manager(group=group, async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x, group=group)
        manager.wait()
        return xs
    both(coalesced)
    # By c10d's older protocol.
    xs = [torch.ones(4, 2).t(), torch.ones(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        works = [dist.group.WORLD.allreduce([x]) for x in xs]
    manager.wait()
    assert all((x == size).all() for x in xs) and len(works) == 2
    for empty in (torch.empty(0), torch.empty(3, 0)):
        dist.all_reduce(empty)


def movements():
    rank, size = dist.get_rank(), dist.get_world_size()

    for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        x = torch.full((3, 3), float(rank), dtype=torch.float32).to(dtype).t()
        dist.broadcast(x, 1)
        assert (x.float() if dtype != torch.complex64 else x.real).eq(1).all()

    def all_gather(group):
        out = [torch.empty(2, 2) for _ in range(size)]
        dist.all_gather(out, values(2, 2).t(), group=group)
        return out
    both(all_gather)
    uneven = [torch.empty(i + 1, 2) for i in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1, 2), float(rank)))
    assert all((x == i).all() for i, x in enumerate(uneven))
    # A list for each rank, of that rank's tensors.
    lists = [[torch.empty(2), torch.empty(0), torch.empty(3, 1)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.empty(0), torch.full((3, 1), rank + 0.5)])
    assert all((x == i).all() and y.numel() == 0 and (z == i + 0.5).all() for i, (x, y, z) in enumerate(lists))
    views = list(torch.empty(size, 3).unbind())
    dist.all_gather(views, torch.full((3,), float(rank)))
    assert all((x == i).all() for i, x in enumerate(views))

    def all_gather_tensor(group):
        out = torch.empty(size * 4, dtype=torch.int64)
        dist.all_gather_into_tensor(out, values(4, dtype=torch.int64), group=group)
        return out
    both(all_gather_tensor)

    def gather(group):
        out = [torch.empty(3) for _ in range(size)] if rank == 1 else None
        dist.gather(values(3), out, dst=1, group=group)
        return out or []
    both(gather)

    def scatter(group):
        out = torch.empty(2)
        dist.scatter(out, [values(2, seed=i) for i in range(size)] if rank == 0 else None, src=0, group=group)
        return out
    both(scatter)

    def all_to_all_single(group):
        out = torch.empty(2 * size, 3)
        dist.all_to_all_single(out, values(2 * size, 3), group=group)
        return out
    both(all_to_all_single)

    def with_splits(group):
        out = torch.empty(sum(r + 1 for r in range(size)), 2, dtype=torch.complex64)
        sent = torch.complex(values(size * (rank + 1), 2), values(size * (rank + 1), 2, seed=2))
        dist.all_to_all_single(out, sent, [r + 1 for r in range(size)], [rank + 1] * size, group=group)
        return out
    both(with_splits)
    received = [torch.empty(r + 1) for r in range(size)]
    dist.all_to_all(received, [torch.full((rank + 1,), float(10 * rank + r)) for r in range(size)])
    assert all((x == 10 * r + rank).all() for r, x in enumerate(received))

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.barrier()
    x = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(x, 1, tag=4)
        dist.recv(x.t(), 1)
    elif rank == 1:
        y = torch.empty(3)
        assert dist.recv(y, 0, tag=4) == 0 and (y == 0).all()
        dist.send(x, 0)
    assert (x == (1 if rank < 2 else rank)).all()
    # A ring of long messages, with the sends first at some ranks, to and from strided tensors.
    x, y = torch.full((300, 300), float(rank)), torch.zeros(300, 600)
    ring = [dist.P2POp(dist.isend, x.t(), (rank + 1) % size), dist.P2POp(dist.irecv, y[:, ::2], (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ring if rank else ring[::-1]):
        work.wait()
    assert (y[:, ::2] == (rank - 1) % size).all() and (y[:, 1::2] == 0).all()


def groups():
    rank, size = dist.get_rank(), dist.get_world_size()
    import sumac.torch

    assert dist.get_backend() == "sumac" and sumac.torch.backend().name() == "sumac"
    explanation = sumac.torch.explain()
    assert explanation.chosen and "no device is connected" in str(explanation)
    part = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        x = torch.ones(3)
        dist.all_reduce(x, group=part)
        assert (x == 2).all()
    half = dist.split_group(split_ranks=[[0], list(range(1, size))])
    x = torch.ones(2)
    dist.all_reduce(x, group=half)
    assert (x == (1 if rank == 0 else size - 1)).all()
    x = sumac.torch.empty(4, 2)
    x += 1
    dist.all_reduce(x)
    assert (x == size).all()
    dist.monitored_barrier()
    order = []
    works = [dist.all_reduce(torch.full((1000,), float(i)), async_op=True) for i in range(10)]
    futures = [work.get_future().then(lambda f, i=i: order.append((i, f.value()[0][0].item()))) for i, work in enumerate(works)]
    torch.futures.wait_all(futures)
    assert sorted(order) == [(i, float(i * size)) for i in range(10)]
    strided = torch.ones(4, 4)
    future = dist.all_reduce(strided[:, ::2], async_op=True).get_future()
    future.wait()
    assert (strided[:, ::2] == size).all() and (strided[:, 1::2] == 1).all()
    # Workers of a data loader are forked, and leave the group alone.
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert sum(batch.sum().item() for batch in loader) == 28
    dist.all_reduce(x)
    assert (x == size**2).all()


def refusals():
    import sumac.torch

    assert "python -m sumac.torch build" in sumac.torch.explain().adapter
    with pytest.raises(NotImplementedError, match="MAX on sparse"):
        dist.all_reduce(torch.ones(3).to_sparse(), ops.MAX)
    with pytest.raises(NotImplementedError, match="AVG on booleans"):
        dist.all_reduce(torch.tensor([True]), ops.AVG)
    with pytest.raises(NotImplementedError, match="any source"):
        dist.recv(torch.ones(1))
    with pytest.raises(ValueError, match="not .* parts of 3 rows"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 1], [1, 1])
    from sumac.torch.tensors import check

    with pytest.raises(NotImplementedError, match="cpu:sumac,cuda:nccl"):
        check(torch.empty(1, device="meta"))
    # torch itself hands sparse tensors to all_reduce only.
    with pytest.raises(NotImplementedError, match="to_dense"):
        check(torch.ones(3).to_sparse())
    dist.barrier()


def mismatched():
    x = torch.ones(3 + dist.get_rank())
    with pytest.raises(dist.DistBackendError, match=r"rank \d: all_reduce: .*all_reduce f32 sum x 3.*all_reduce f32 sum x 4"):
        dist.all_reduce(x)
    with pytest.raises(dist.DistBackendError, match="all_reduce f32 sum x 3"):
        dist.barrier()


def late():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier in 100 ms"):
            dist.monitored_barrier(timeout=datetime.timedelta(milliseconds=100))
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(dist.DistBackendError, match="wait again"):
            work.wait(datetime.timedelta(milliseconds=50))
        store.set("go", "")
        work.wait()
    else:
        store.wait(["go"])
        dist.all_reduce(torch.ones(3))


def timed_out():
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="timeout has passed: .*did not complete within (9|10).. ms"):
            dist.all_reduce(torch.ones(3), group=group)
        store.set("go", "")
    else:
        store.wait(["go"])
    # Other groups are not affected.
    dist.barrier()


def aborted():
    work = dist.barrier(async_op=True) if dist.get_rank() == 0 else None
    dist.distributed_c10d._abort_process_group()
    if work is not None:
        with pytest.raises(dist.DistBackendError):
            work.wait()
    os._exit(0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reductions_give_what_gloo_gives(run_ranks, ranks):
    run_ranks(reductions, ranks=ranks)


def test_movements_give_what_gloo_gives(run_ranks):
    run_ranks(movements, ranks=3)


def test_groups_futures_and_memory_of_the_backend(run_ranks):
    run_ranks(groups, ranks=3)


def test_unsupported_operation_is_not_implemented_by_name(run_ranks):
    run_ranks(refusals)


def test_mismatch_is_a_backend_error_with_rank_and_both_calls(run_ranks):
    run_ranks(mismatched)


def test_monitored_barrier_names_the_late_rank_and_spares_the_group(run_ranks):
    run_ranks(late)


def test_timeout_of_a_group_ends_its_operation_and_no_other_group(run_ranks):
    run_ranks(timed_out)


def test_abort_ends_operations(run_ranks):
    run_ranks(aborted)


def test_torch_without_backends_in_python_is_an_import_error_that_says_so(monkeypatch):
    import sumac.torch

    # As in torch 1.13.
    monkeypatch.delattr(torch._C._distributed_c10d, "Backend")
    with pytest.raises(ImportError, match=r"needs torch 2.15, whose c10d.Backend Python can subclass; torch \S+ has none"):
        importlib.reload(sumac.torch)

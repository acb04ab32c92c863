"""Every collective in both dialects, blocking and started, on a tree and without one."""

import numpy as np
import pytest

import sumac


def all_forms():
    with sumac.init() as comm:
        n, rank = comm.size, comm.rank
        ranks = np.arange(n, dtype="f8")
        x, out = np.full(3, rank, "f8"), np.zeros(3)
        comm.all_reduce(x, "sum", out=out)
        assert (out == ranks.sum()).all() and (x == rank).all()
        comm.all_reduce(out, sumac.MAX)
        assert (out == ranks.sum()).all()
        comm.reduce(x, "sum", 1, out=out if rank == 1 else None)
        assert rank != 1 or (out == ranks.sum()).all()
        y = np.full(2, rank)
        comm.broadcast(y, root=1)
        assert (y == 1).all()
        blocks = np.repeat(np.arange(n, dtype="f8"), 2) + rank
        own = np.zeros(2)
        comm.reduce_scatter(blocks, "sum", out=own)
        assert (own == n * rank + ranks.sum()).all()
        comm.reduce_scatter(blocks, "sum")
        assert (blocks[2 * rank : 2 * rank + 2] == own).all()
        gathered = np.zeros((n, 2))
        comm.all_gather(np.full(2, rank, "f8"), gathered)
        assert (gathered == ranks[:, None]).all()
        gathered[:] = -1
        gathered[rank] = rank
        comm.all_gather(None, gathered)
        assert (gathered == ranks[:, None]).all()
        gathered[:] = -1
        gathered[rank] = rank
        comm.all_gather(gathered[rank], gathered)
        assert (gathered == ranks[:, None]).all()
        same = np.full(2, rank, "f8")
        comm.all_reduce(same, out=same)
        assert (same == ranks.sum()).all()
        comm.gather(x, np.empty((n, 3)) if rank == 0 else None)
        scattered = np.zeros(2)
        comm.scatter(gathered if rank == 1 else None, scattered, root=1)
        assert (scattered == rank).all()
        exchanged = np.zeros(n)
        comm.all_to_all(np.full(n, rank, "f8"), exchanged)
        assert (exchanged == ranks).all()
        exchanged[:] = rank
        comm.all_to_all(exchanged)
        assert (exchanged == ranks).all()
        # Rank r sends r + 1 values to each rank.
        sent, received = np.full(n * (rank + 1), rank, "i2"), np.zeros(n * (n + 1) // 2, "i2")
        comm.all_to_all_v(sent, [rank + 1] * n, received, [r + 1 for r in range(n)])
        assert (received == np.concatenate([np.full(r + 1, r) for r in range(n)])).all()
        # Rank r has r + 1 values.
        counts, start = [r + 1 for r in range(n)], rank * (rank + 1) // 2
        gathered = np.zeros(sum(counts), "i2")
        comm.all_gather_v(np.full(rank + 1, rank, "i2"), gathered, counts)
        assert (gathered == received).all()
        own = np.zeros(rank + 1)
        comm.reduce_scatter_v(np.arange(sum(counts), dtype="f8"), own, counts, "sum")
        assert (own == n * np.arange(start, start + rank + 1)).all()
        complexes = np.zeros(sum(counts), "c8")
        comm.Allgatherv(np.full(rank + 1, rank + 1j, "c8"), [complexes, counts])
        assert (complexes == received + 1j).all()
        halves = np.full(n, rank + 1j, "c8")
        mixed = np.zeros(n, "c8")
        comm.all_to_all_v(halves, [1] * n, mixed, [1] * n)
        assert (mixed == ranks + 1j).all()
        comm.barrier()
        pairs = np.array([[rank, rank]], "f4").view([("value", "f4"), ("index", "u4")])
        pairs["index"] = rank
        flat = pairs.view("f4")
        comm.all_reduce(flat, "maxloc")
        assert pairs["value"][0] == n - 1 and pairs["index"][0] == n - 1
        halves = np.full(3, rank + 1, "c8") * (1 + 2j)
        comm.all_reduce(halves, "avg")
        assert np.allclose(halves, (ranks + 1).mean() * (1 + 2j))
        print(comm.all_reduce(x).path)


def mpi_forms():
    with sumac.init() as comm:
        n, rank = comm.Get_size(), comm.Get_rank()
        ranks = np.arange(n, dtype="f8")
        a, b = np.full(4, rank, "f8"), np.zeros(4)
        comm.Allreduce(a, b, op=sumac.SUM)
        assert (b == ranks.sum()).all()
        comm.Allreduce(sumac.IN_PLACE, a, op=sumac.MAX)
        assert (a == n - 1).all()
        a[:] = rank
        request = comm.Iallreduce(a, b)
        while not request.Test():
            pass
        assert request.Wait() and (b == ranks.sum()).all()
        comm.Reduce(a, b if rank == 0 else None)
        in_place = (sumac.IN_PLACE, a.copy()) if rank == 0 else (a, None)
        comm.Reduce(*in_place, op=sumac.SUM)
        assert rank != 0 or (in_place[1] == ranks.sum()).all()
        comm.Bcast(b, root=1)
        own, everything = np.full(1, rank, "f8"), np.zeros(n)
        comm.Allgather(own, everything)
        assert (everything == ranks).all()
        everything[:] = 0
        everything[rank] = rank
        comm.Allgather(sumac.IN_PLACE, everything)
        assert (everything == ranks).all()
        everything[rank] = rank
        comm.Gather(sumac.IN_PLACE if rank == 0 else own, everything if rank == 0 else None)
        assert (everything == ranks).all()
        comm.Scatter(ranks + 5 if rank == 0 else None, own)
        assert own[0] == rank + 5
        sent = ranks + 5
        comm.Scatter(sent if rank == 0 else None, sumac.IN_PLACE if rank == 0 else own)
        assert rank == 0 or own[0] == rank + 5
        comm.Alltoall(ranks, everything)
        assert (everything == rank).all()
        comm.Alltoallv([ranks, [1] * n], [everything, [1] * n])
        comm.Reduce_scatter_block(ranks, own)
        assert own[0] == n * rank
        comm.Barrier()
        for wrong in (lambda: comm.Reduce(a, None, root=rank), lambda: comm.Gather(sumac.IN_PLACE, a, (rank + 1) % n)):
            with pytest.raises(TypeError):
                wrong()
        part = comm.Split(color=rank % 2, key=-rank)
        assert part.size == len(range(rank % 2, n, 2))
        part.Free()
        assert comm.Split(None) is None


def messages():
    with sumac.init() as comm:
        peer = 1 - comm.rank
        x, out = np.full(9, comm.rank, "f4"), np.zeros(9, "f4")
        comm.send_receive(x, peer, out, peer, tag=3)
        assert (out == peer).all()
        if comm.rank == 0:
            comm.Send(x, dest=1, tag=7)
            comm.Recv(out, source=1)
        else:
            comm.receive(out, source=0, tag=7)
            assert (out == 0).all()
            comm.send(x, to=0)
        assert (out == peer).all()
        # From whichever rank sends.
        if comm.rank == 0:
            assert comm.receive(out, tag=4) == 1
            request = comm.Irecv(out, sumac.ANY_SOURCE, tag=4)
            assert request.source is None
            request.Wait()
            assert request.source == 1
            assert (out == 1).all()
        else:
            comm.send(x, to=0, tag=4)
            comm.Isend(x, 0, tag=4).wait()
        # Messages, and collectives between them, in different orders, longer than any buffer.
        xs, outs = np.full((4, 1 << 18), comm.rank + 1.0), np.zeros((4, 1 << 18))
        requests = []
        for i in range(4):
            started = [lambda i=i: comm.Isend(xs[i], peer, i), lambda i=i: comm.Irecv(outs[i], peer, i)]
            requests += [start() for start in (started if comm.rank == 0 else reversed(started))]
            comm.barrier()
        while not requests[-1].Test():
            pass
        sumac.wait_all(requests)
        assert (outs == peer + 1).all()
        with pytest.raises(sumac.Error, match="rank 9"):
            comm.send(x, to=9)
        comm.barrier()


@pytest.mark.parametrize(("devices", "path"), [(1, "tree"), (0, "rd")])
def test_every_collective_computes_what_it_says(run_ranks, devices, path):
    ended = run_ranks(all_forms, ranks=3 if devices else 4, devices=devices)
    assert {rank.stdout.strip() for rank in ended} <= {path, "one-shot", "hd"}


def test_two_levels_of_devices_are_one_tree(run_ranks):
    assert {rank.stdout for rank in run_ranks(all_forms, ranks=4, levels=2)} == {"tree\n"}


def test_methods_of_mpi4py_compute_what_mpi_says(run_ranks):
    run_ranks(mpi_forms, ranks=4)


def test_messages_arrive_in_both_directions(run_ranks):
    run_ranks(messages)

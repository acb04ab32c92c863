"""Started operations, waits, signals, failures, forks and ends of programs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import sumac
from conftest import command


def begin(cluster, function):
    """Start ranks that wait for a line on their standard input."""
    pipe, line = subprocess.PIPE, command(function)
    environments = [{**os.environ, **own} for own in cluster.environments()]
    return [subprocess.Popen(line, env=env, stdin=pipe, stdout=pipe, text=True) for env in environments]


def end(ranks):
    """Send the line, and expect that the ranks succeed."""
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    for rank in ranks:
        assert rank.wait(60) == 0


def overlap():
    with sumac.init() as comm:
        xs = [np.full(1000, comm.rank + i, "f4") for i in range(20)]
        order, last = [], threading.Event()
        requests = [comm.start_all_reduce(x) for x in xs]
        for i, request in enumerate(requests):
            request.add_done_callback(lambda i=i: order.append(i))
        requests[-1].add_done_callback(last.set)
        del requests[:10]  # Detached operations go on.
        outcomes = sumac.wait_all(requests)
        assert all(outcome.path == "tree" for outcome in outcomes) and requests[0].wait().path == "tree"
        assert all((x == 2 * i + 1).all() for i, x in enumerate(xs))
        assert last.wait(60)
        assert order == list(range(20))
        requests[0].add_done_callback(lambda: order.append(20))
        assert order[-1] == 20


def test_started_operations_complete_in_order_and_call_back(run_ranks):
    run_ranks(overlap)


def progress():
    with sumac.init() as comm:
        x = np.ones(1 << 20, "f4")
        comm.barrier()
        request = comm.start_all_reduce(x)
        end = time.monotonic() + 20
        # Nobody waits, and other threads have the GIL.
        while not request.test():
            begun = time.monotonic()
            request.test()
            assert time.monotonic() - begun < 1 and begun < end
        assert x[0] == 2


def test_started_host_collective_completes_without_a_wait(run_ranks):
    run_ranks(progress, devices=0)


def gil():
    with sumac.init() as comm:
        token = np.ones(1)
        if comm.rank == 0:
            entered, done = threading.Event(), threading.Event()

            def wait():
                request = comm.start_barrier()
                entered.set()
                request.wait()
                done.set()

            # A thread that does not wait keeps the interpreter for a minute: after the event, the other one goes on
            # only because the wait for the barrier gives the interpreter up.
            sys.setswitchinterval(60)
            thread = threading.Thread(target=wait)
            thread.start()
            assert entered.wait(60) and not done.is_set()
            print("ran", flush=True)
            comm.send(token, to=1)
            thread.join()
        else:
            comm.receive(token, source=0)
            comm.barrier()


def test_other_threads_run_while_one_waits(run_ranks):
    assert run_ranks(gil)[0].stdout == "ran\n"


def interrupted():
    # A shell's background jobs inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = sumac.init()
    x = np.ones(4)
    if comm.rank == 0:
        request = comm.start_all_reduce(x)
        try:
            print("waiting", flush=True)
            request.wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        # The operation goes on, and the wait can be taken up again.
        sys.stdin.readline()
        request.wait()
    else:
        sys.stdin.readline()
        comm.all_reduce(x)
    assert (x == 2).all()
    comm.leave()


def test_ctrl_c_ends_a_wait_which_can_be_resumed(sumac_cluster):
    cluster = sumac_cluster(2)
    ranks = begin(cluster, interrupted)
    try:
        assert ranks[0].stdout.readline() == "waiting\n"
        begun = time.monotonic()
        ranks[0].send_signal(signal.SIGINT)
        assert ranks[0].stdout.readline() == "interrupted\n"
        assert time.monotonic() - begun < 10
        end(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def timeout():
    comm = sumac.init()
    token = np.ones(1)
    if comm.rank == 0:
        request = comm.start_barrier()
        with pytest.raises(TimeoutError, match="wait again"):
            request.wait(0.05)
        comm.send(token, to=1)
        comm.split(None)
        request.wait()
    else:
        comm.receive(token, source=0)
        comm.barrier()
        comm.split(None)
    comm.leave()


def test_wait_with_a_timeout_leaves_the_operation_running(run_ranks):
    run_ranks(timeout)


def mismatch():
    comm = sumac.init()
    with pytest.raises(sumac.errors.MismatchError) as caught:
        comm.all_reduce(np.zeros(3 + comm.rank, "f4"))
    assert {caught.value.first.count, caught.value.other.count} == {3, 4}
    assert caught.value.first.dtype == "f32" and "all ranks must make the same calls" in str(caught.value)
    # A call that is submitted while the end is being reported gets the error itself.
    with pytest.raises((sumac.errors.EndedError, sumac.errors.MismatchError)):
        comm.barrier()
    with pytest.raises(sumac.errors.EndedError) as ended:
        for _ in range(1000):
            with contextlib.suppress(sumac.errors.MismatchError):
                comm.barrier()
    assert isinstance(ended.value.cause, sumac.errors.MismatchError)


def test_mismatch_is_raised_with_both_operations(run_ranks):
    run_ranks(mismatch)


def shrunk():
    comm = sumac.init(deadline=20)
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    with pytest.raises(sumac.errors.RanksFailedError) as caught:
        for _ in range(1000):
            comm.all_reduce(np.ones(1000))
    assert caught.value.ranks == [1] and isinstance(caught.value.operation, int)
    assert not caught.value.is_rejection
    with comm.shrink() as rest:
        x = np.ones(2)
        rest.all_reduce(x)
        assert (x == 2).all() and rest.size == 2


def test_survivors_of_a_dead_rank_continue_with_shrink(run_ranks):
    ended = run_ranks(shrunk, ranks=3, check=False)
    assert [rank.returncode for rank in ended] == [0, 3, 0], ended


def rejected():
    with sumac.init() as comm:
        with pytest.raises(sumac.errors.ArgumentError) as caught:
            comm.reduce_scatter(np.ones(4), out=np.ones(3))
        assert caught.value.is_rejection and isinstance(caught.value, ValueError)
        with pytest.raises(sumac.errors.NotPossibleError):
            comm.all_to_all(np.ones(2), np.ones(2), algo="tree")
        comm.barrier()


def test_rejected_call_leaves_the_communicator_usable(run_ranks):
    run_ranks(rejected)


def forked():
    with sumac.init() as comm:
        x = comm.empty(10)
        x[:] = 5
        request = comm.start_barrier()
        child = os.fork()
        if child == 0:
            failed = 0
            for call in (lambda: comm.barrier(), lambda: request.wait(), lambda: comm.empty(3), lambda: comm.leave()):
                try:
                    call()
                except sumac.errors.ForkedError:
                    failed += 1
            del comm, request
            os._exit(0 if failed == 4 and (x == 5).all() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        request.wait()
        comm.all_reduce(x)
        assert (x == 10).all()


def test_forked_child_gets_errors_and_reads_memory(run_ranks):
    run_ranks(forked)


def cancelled():
    comm = sumac.init()
    if comm.rank == 0:
        threading.Timer(0.2, comm.cancel).start()
        with pytest.raises(sumac.errors.CancelledError):
            comm.barrier()
    else:
        with pytest.raises((sumac.errors.RanksFailedError, sumac.errors.RankLostError)):
            comm.receive(np.ones(1), source=0)


def test_cancel_ends_a_blocked_call(run_ranks):
    run_ranks(cancelled)


def unleft(fails):
    comm = sumac.init()
    comm.barrier()
    if fails and comm.rank == 0:
        raise SystemError("the program fails")
    if fails:
        try:
            comm.all_reduce(np.ones(1))
        except sumac.errors.RanksFailedError:
            print("lost")


def test_program_that_ends_without_leaving_leaves(run_ranks):
    assert [rank.stderr for rank in run_ranks(unleft, False)] == ["", ""]


def test_program_that_ends_by_an_exception_is_lost_to_the_others(run_ranks):
    ended = run_ranks(unleft, True, check=False)
    assert ended[0].returncode == 1 and "the program fails" in ended[0].stderr
    assert ended[1].stdout == "lost\n"


def explained():
    with sumac.init() as comm:
        explanation = comm.explain("all_reduce", 1000, "f32", "sum")
        ruled_out = [candidate for candidate in explanation.candidates if candidate.path == "tree"]
        assert explanation.chosen != "tree" and ruled_out[0].reason and ruled_out[0].cost_s is None
        outcome = comm.all_reduce(np.ones(1000, "f4"))
        assert outcome.path == explanation.chosen and "there is no tree" in outcome.fallback
        assert ruled_out[0].reason in str(explanation)


def test_explanation_and_outcome_give_the_reason_of_a_fallback(run_ranks):
    run_ranks(explained, devices=0)


def recovered():
    with sumac.init() as comm:
        x = np.ones(1 << 18, "f4")
        comm.all_reduce(x)
        print("ready", flush=True)
        sys.stdin.readline()
        outcomes = [comm.all_reduce(np.ones(1000, "f4")) for _ in range(3)]
        assert outcomes[-1].path != "tree" or outcomes[-1].recovered


def test_killed_device_is_recovered_from(sumac_cluster):
    cluster = sumac_cluster(2)
    ranks = begin(cluster, recovered)
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        assert cluster.devices_in_use() == [0]
        cluster.kill_device(0)
        end(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def test_join_error_says_what_was_tried():
    with pytest.raises(sumac.errors.JoinError, match="127.0.0.1:1"):
        sumac.init(controller="127.0.0.1:1", job="none", rank=0, world=1, join_timeout=1)

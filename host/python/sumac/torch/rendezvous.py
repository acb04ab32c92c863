"""How the ranks of a process group meet: by the store that torch gives the group.

Rank 0 makes a job's name that no other job can have, and puts it there with the controller to join. Where the environment
names no controller, rank 0 runs one, and puts its address and a key there, which only this job has. So who reads the
store can join the job: the trust is the store's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .. import _sumac
from ..communicator import Communicator

ASK_INTERVAL = timedelta(milliseconds=100)
"""How often rank 0 looks for ranks that ask again. Only what an earlier attempt has left in the store makes it look."""

CLOSE_TIMEOUT = 60.0
"""How long a process waits, in seconds, until the groups that use its controller have left."""

_controllers: list[_sumac.Controller] = []


def join(store: Store, rank: int, size: int, timeout: timedelta) -> Communicator:
    """Join the job of a process group."""
    entry = _answer(store, size, timeout) if rank == 0 else _ask(store, rank, timeout)
    if "error" in entry:
        raise RuntimeError(f"rank 0 of the group cannot start a controller: {entry['error']}")
    settings: dict[str, Any] = {**entry, "rank": rank, "world": size}
    limit = timeout.total_seconds()
    return Communicator(_sumac.join(**settings, join_timeout=limit, deadline=limit))


def _ask(store: Store, rank: int, timeout: timedelta) -> dict[str, str]:
    """Ask rank 0 which job to join.

    The store may hold what an attempt before a restart has written. So each rank asks by a number that nobody used
    before, and only the answer to that counts.
    """
    nonce = secrets.token_hex(16)
    store.set(f"sumac/ask/{rank}", nonce)
    answer = f"sumac/answer/{nonce}"
    store.wait([answer], timeout)
    entry: dict[str, str] = json.loads(store.get(answer))
    store.set(f"sumac/{entry['job']}/{rank}", "answered")
    return entry


def _answer(store: Store, size: int, timeout: timedelta) -> dict[str, str]:
    """Choose job and controller, and tell every other rank, until each has got it."""
    entry = {"job": f"torch-{secrets.token_hex(16)}"}
    try:
        entry |= _controller()
    except Exception as error:
        # The other ranks would wait for nothing.
        entry["error"] = str(error)
    end = time.monotonic() + timeout.total_seconds()
    waiting = list(range(1, size))
    while waiting:
        for rank in waiting:
            store.wait([f"sumac/ask/{rank}"], timedelta(seconds=max(end - time.monotonic(), 0.001)))
            store.set(f"sumac/answer/{store.get(f'sumac/ask/{rank}').decode()}", json.dumps(entry))
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"sumac/{entry['job']}/{rank}" for rank in waiting], ASK_INTERVAL)
        waiting = [rank for rank in waiting if not store.check([f"sumac/{entry['job']}/{rank}"])]
        if waiting and time.monotonic() > end:
            raise TimeoutError(f"ranks {waiting} did not ask for the job within {timeout.total_seconds()} s")
    return entry


def close_controllers() -> None:
    """Stop the controllers of this process, once the jobs that use them have left."""
    while _controllers:
        _controllers.pop().close(CLOSE_TIMEOUT)


def _controller() -> dict[str, str]:
    """Return the controller to join: that of the environment, which each rank reads, or one in this process."""
    if "SUMAC_CONTROLLER" in os.environ or "SUMAC_CONFIG" in os.environ:
        return {}
    if not _controllers:
        _controllers.append(_sumac.Controller(f"{_own_address()}:0"))
    return {"controller": _controllers[0].address, "key": _controllers[0].key}


def _own_address() -> str:
    """Return the address of this host that routes to the store's host."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # No packet is sent: the system only chooses a route.
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return f"[{own}]" if family == socket.AF_INET6 else own

"""Clusters for the tests of programs: a controller and emulated devices in this process, and programs as ranks.

pytest finds the fixture ``sumac_cluster`` by itself:

    def test_sum(sumac_cluster):
        cluster = sumac_cluster(ranks=2)
        ranks = cluster.run([sys.executable, "program.py"])
        assert all(rank.returncode == 0 for rank in ranks)

Everything is production code over real sockets and memory; only the devices' hardware is emulated.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from ._sumac import Cluster as _Cluster

try:
    import pytest
except ImportError:  # The cluster works without.
    pytest = None  # type: ignore[assignment]


class Cluster:
    """A controller and emulated devices.

    ``levels`` is 1 or 2: with 2, half of the ranks are below each of two leaf devices. Devices that a tree does not
    need are spares. With none, jobs run on host collectives. ``transport`` is auto, shm or udp.
    """

    def __init__(self, ranks: int = 2, *, levels: int = 1, devices: int | None = None, transport: str = "auto") -> None:
        self.ranks = ranks
        self._core = _Cluster(ranks, levels, devices if devices is not None else 2 * levels - 1, transport)

    def environments(self) -> list[dict[str, str]]:
        """Return the environments of the ranks of a new job, for programs that call ``sumac.init()``."""
        return [dict(variables) for variables in self._core.environments()]

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """Start a program as each rank of a new job. Standard output and error are pipes."""
        started: list[subprocess.Popen[str]] = []
        for own in self.environments():
            variables = {**os.environ, **(env or {}), **own}
            pipes = subprocess.PIPE
            started.append(subprocess.Popen(list(command), env=variables, stdout=pipes, stderr=pipes, text=True))
        return started

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 60.0
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a program as each rank of a new job, and wait for all. After ``timeout`` seconds they are killed."""
        started = self.start(command, env=env)
        ended = []
        try:
            for rank in started:
                out, error = rank.communicate(timeout=timeout)
                ended.append(subprocess.CompletedProcess(list(command), rank.returncode, out, error))
        finally:
            for rank in started:
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()
                rank.wait()
        return ended

    def devices_in_use(self) -> list[int]:
        """Return the numbers of the devices that trees of running jobs use."""
        return self._core.devices_in_use()

    def kill_device(self, device: int) -> None:
        """Kill a device, as if its process had died."""
        self._core.kill_device(device)

    def start_device(self, device: int) -> None:
        """Start a device again that was killed. It has lost its state."""
        self._core.start_device(device)

    def stop(self) -> None:
        """Stop the controller and the devices."""
        self._core.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


if pytest is not None:

    @pytest.fixture
    def sumac_cluster() -> Iterator[Callable[..., Cluster]]:
        """Start clusters that stop at the end of the test: call it with the arguments of :class:`Cluster`."""
        with contextlib.ExitStack() as stack:
            yield lambda *args, **named: stack.enter_context(Cluster(*args, **named))

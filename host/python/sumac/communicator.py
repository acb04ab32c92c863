"""Communicators: a rank's membership in a job, and the collectives of the job."""

from __future__ import annotations

import atexit
import math
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from . import _sumac
from ._sumac import Outcome, Request
from .mpi import MpiMethods
from .types import Array, Options

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LEAVE_TIMEOUT = 60.0
"""How long leaving waits for other ranks, in seconds."""


@dataclass(frozen=True)
class Candidate:
    """A path that an operation could take: its cost, or the reason why it is ruled out."""

    path: str
    cost_s: float | None
    reason: str | None


@dataclass(frozen=True)
class Explanation:
    """Which path an operation would take, and why."""

    text: str
    chosen: str | None
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        return self.text


class Communicator(MpiMethods):
    """A rank's membership in a job.

    All ranks make the same calls in the same order. Each collective has two forms: ``all_reduce`` returns when the
    operation is complete at this rank; ``start_all_reduce`` returns a :class:`Request` at once, and the operation goes
    on by itself. Arrays are used where they are: an operation that is still running, after Ctrl-C as well, keeps using
    its arrays until it ends.

    Leave the job when you are done, with :meth:`leave` or as a context manager. A program that ends normally without it
    leaves at its exit; one that ends by an exception is lost to the other ranks at once.
    """

    def __init__(self, core: _sumac.Communicator) -> None:
        self._core = core
        self._left = False
        _open.add(self)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._core.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._core.size

    @property
    def name(self) -> str:
        """The job's name, with a suffix for each split or shrink."""
        return self._core.name

    def start_all_reduce(
        self, x: Array, op: str = "sum", *, out: Array | None = None, **options: Unpack[Options]
    ) -> Request:
        """Combine ``x`` elementwise over all ranks, in place or into ``out``."""
        return self._core.start("all_reduce", *_in_place_or(x, out), op, 0, options)

    def all_reduce(
        self, x: Array, op: str = "sum", *, out: Array | None = None, **options: Unpack[Options]
    ) -> Outcome:
        """Combine ``x`` elementwise over all ranks, in place or into ``out``."""
        return _completed(self.start_all_reduce(x, op, out=out, **options))

    def start_reduce(
        self, x: Array, op: str = "sum", root: int = 0, *, out: Array | None = None, **options: Unpack[Options]
    ) -> Request:
        """Combine ``x`` elementwise over all ranks. The root gets the result, in place or in ``out``."""
        arrays = _in_place_or(x, out) if self.rank == root else (x, None)
        return self._core.start("reduce", *arrays, op, root, options)

    def reduce(
        self, x: Array, op: str = "sum", root: int = 0, *, out: Array | None = None, **options: Unpack[Options]
    ) -> Outcome:
        """Combine ``x`` elementwise over all ranks. The root gets the result, in place or in ``out``."""
        return _completed(self.start_reduce(x, op, root, out=out, **options))

    def start_broadcast(self, x: Array, root: int = 0, **options: Unpack[Options]) -> Request:
        """Copy the root's ``x`` to all ranks."""
        return self._core.start("broadcast", None, x, None, root, options)

    def broadcast(self, x: Array, root: int = 0, **options: Unpack[Options]) -> Outcome:
        """Copy the root's ``x`` to all ranks."""
        return _completed(self.start_broadcast(x, root, **options))

    def start_reduce_scatter(
        self, x: Array, op: str = "sum", *, out: Array | None = None, **options: Unpack[Options]
    ) -> Request:
        """Combine ``x`` elementwise over all ranks. Rank r gets block r of the result, in ``out`` or where it is."""
        return self._core.start("reduce_scatter", *_in_place_or(x, out), op, 0, options)

    def reduce_scatter(
        self, x: Array, op: str = "sum", *, out: Array | None = None, **options: Unpack[Options]
    ) -> Outcome:
        """Combine ``x`` elementwise over all ranks. Rank r gets block r of the result, in ``out`` or where it is."""
        return _completed(self.start_reduce_scatter(x, op, out=out, **options))

    def start_all_gather(self, x: Array | None, out: Array, **options: Unpack[Options]) -> Request:
        """Every rank gets the ``x`` of all ranks in ``out``. Without ``x``, its block is already there."""
        return self._core.start("all_gather", x, out, None, 0, options)

    def all_gather(self, x: Array | None, out: Array, **options: Unpack[Options]) -> Outcome:
        """Every rank gets the ``x`` of all ranks in ``out``. Without ``x``, its block is already there."""
        return _completed(self.start_all_gather(x, out, **options))

    def start_gather(
        self, x: Array | None, out: Array | None = None, root: int = 0, **options: Unpack[Options]
    ) -> Request:
        """The root gets the ``x`` of all ranks in ``out``. Without ``x`` at the root, its block is already there."""
        output = self._at_root(out, root)
        return self._core.start("gather", x, output, None, root, options)

    def gather(
        self, x: Array | None, out: Array | None = None, root: int = 0, **options: Unpack[Options]
    ) -> Outcome:
        """The root gets the ``x`` of all ranks in ``out``. Without ``x`` at the root, its block is already there."""
        return _completed(self.start_gather(x, out, root, **options))

    def start_scatter(
        self, x: Array | None, out: Array | None = None, root: int = 0, **options: Unpack[Options]
    ) -> Request:
        """Rank r gets block r of the root's ``x`` in ``out``. Without ``out`` at the root, its block stays in ``x``."""
        return self._core.start("scatter", *_in_place_or(self._at_root(x, root), out), None, root, options)

    def scatter(
        self, x: Array | None, out: Array | None = None, root: int = 0, **options: Unpack[Options]
    ) -> Outcome:
        """Rank r gets block r of the root's ``x`` in ``out``. Without ``out`` at the root, its block stays in ``x``."""
        return _completed(self.start_scatter(x, out, root, **options))

    def start_all_to_all(self, x: Array, out: Array | None = None, **options: Unpack[Options]) -> Request:
        """Rank r gets block r of every rank's ``x``, in ``out`` or in place."""
        return self._core.start("all_to_all", *_in_place_or(x, out), None, 0, options)

    def all_to_all(self, x: Array, out: Array | None = None, **options: Unpack[Options]) -> Outcome:
        """Rank r gets block r of every rank's ``x``, in ``out`` or in place."""
        return _completed(self.start_all_to_all(x, out, **options))

    def start_all_to_all_v(
        self, x: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]
    ) -> Request:
        """All-to-all with blocks of any length, which lie behind each other in rank order."""
        return self._core.start_all_to_all_v(x, list(send_counts), out, list(recv_counts))

    def all_to_all_v(self, x: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> Outcome:
        """All-to-all with blocks of any length, which lie behind each other in rank order."""
        return _completed(self.start_all_to_all_v(x, send_counts, out, recv_counts))

    def start_all_gather_v(self, x: Array, out: Array, counts: Sequence[int]) -> Request:
        """All-gather with blocks of any length: ``counts`` has the number of elements of each rank."""
        return self._core.start_blocks_v(x, out, list(counts))

    def all_gather_v(self, x: Array, out: Array, counts: Sequence[int]) -> Outcome:
        """All-gather with blocks of any length: ``counts`` has the number of elements of each rank."""
        return _completed(self.start_all_gather_v(x, out, counts))

    def start_reduce_scatter_v(self, x: Array, out: Array, counts: Sequence[int], op: str = "sum") -> Request:
        """Reduce-scatter with blocks of any length: rank r gets ``counts[r]`` elements."""
        return self._core.start_blocks_v(x, out, list(counts), op)

    def reduce_scatter_v(self, x: Array, out: Array, counts: Sequence[int], op: str = "sum") -> Outcome:
        """Reduce-scatter with blocks of any length: rank r gets ``counts[r]`` elements."""
        return _completed(self.start_reduce_scatter_v(x, out, counts, op))

    def start_barrier(self, **options: Unpack[Options]) -> Request:
        """Wait for every rank."""
        return self._core.start("barrier", None, None, None, 0, options)

    def barrier(self, **options: Unpack[Options]) -> Outcome:
        """Wait for every rank."""
        return _completed(self.start_barrier(**options))

    def start_send(self, x: Array, to: int, tag: int = 0) -> Request:
        """Start to send ``x`` to a rank, which receives it with the same tag and length.

        Messages between two ranks arrive in the order in which they were started."""
        return self._core.start_send(x, to, tag)

    def start_receive(self, x: Array, source: int | None = None, tag: int = 0) -> Request:
        """Start to receive ``x`` from a rank, or the next message with this tag from whichever rank sends first:
        ``Request.source`` tells which, after the wait."""
        return self._core.start_receive(x, source, tag)

    def send(self, x: Array, to: int, tag: int = 0) -> None:
        """Send ``x`` to a rank, which receives it with the same tag and length. May wait for the receiver."""
        self.start_send(x, to, tag).wait()

    def receive(self, x: Array, source: int | None = None, tag: int = 0) -> int:
        """Receive ``x`` from a rank, or from whichever sends first. Returns the sender."""
        request = self.start_receive(x, source, tag)
        request.wait()
        assert request.source is not None
        return request.source

    def send_receive(self, x: Array, to: int, out: Array, source: int, tag: int = 0) -> None:
        """Send ``x`` to one rank and receive ``out`` from another at the same time."""
        wait_all([self.start_send(x, to, tag), self.start_receive(out, source, tag)])

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make communicators of the ranks with the same color, ordered by key. A rank without a color gets none."""
        core = self._core.split(color, key)
        return None if core is None else Communicator(core)

    def shrink(self) -> Communicator:
        """Make a communicator of the surviving ranks, after ``RanksFailedError``."""
        return Communicator(self._core.shrink())

    def leave(self, timeout: float = LEAVE_TIMEOUT) -> bool:
        """Leave the job, after all operations that this rank has started. Returns False if other ranks may still need
        this one after ``timeout`` seconds."""
        self._left = True
        return self._core.leave(timeout)

    def cancel(self) -> None:
        """End the communicator from any thread, also while operations run: they raise CancelledError, and other ranks
        see this one as lost."""
        self._core.cancel()

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = "float32") -> np.ndarray[Any, Any]:
        """Return a zeroed numpy array on registered memory: where this rank shares memory with its leaf device,
        operations on it are zero-copy. The memory lives as long as any view of it."""
        try:
            import numpy
        except ImportError as error:
            raise ImportError("sumac.empty returns a numpy array: pip install numpy") from error
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        element = numpy.dtype(dtype)
        memory = self._core.alloc(math.prod(shape) * element.itemsize)
        return numpy.ndarray(shape, element, buffer=memoryview(memory))

    def explain(
        self,
        collective: str,
        count: int,
        dtype: str | None = "f32",
        op: str | None = "sum",
        *,
        root: int = 0,
        algo: str = "auto",
    ) -> Explanation:
        """Explain which path an operation would take, each candidate's cost, and why others are ruled out."""
        moves = collective not in ("all_reduce", "reduce", "reduce_scatter")
        text, chosen, candidates = self._core.explain(collective, dtype, None if moves else op, root, count, algo)
        return Explanation(text, chosen, tuple(Candidate(*candidate) for candidate in candidates))

    def Split(self, color: int | None = 0, key: int = 0) -> Communicator | None:
        """mpi4py's name of ``split``. The color None stands for MPI.UNDEFINED."""
        return self.split(color, key)

    def Free(self) -> None:
        """mpi4py's name of ``leave``."""
        self.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self._left = True
            self.cancel()

    def __repr__(self) -> str:
        return f"<sumac.Communicator {self.name!r}, rank {self.rank} of {self.size}>"


def wait_all(requests: Iterable[Request]) -> list[Outcome | None]:
    """Wait for all requests, and return their outcomes. Raises the first error once all have ended."""
    outcomes: list[Outcome | None] = []
    failure: Exception | None = None
    for request in requests:
        try:
            outcomes.append(request.wait())
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return outcomes


def _in_place_or(x: Array | None, out: Array | None) -> tuple[Array | None, Array | None]:
    return (None, x) if out is None else (x, out)


def _completed(request: Request) -> Outcome:
    outcome = request.wait()
    assert outcome is not None, "collectives have outcomes"
    return outcome


def has_failed() -> bool:
    """Return whether the program ends by an exception that nobody handled."""
    return getattr(sys, "last_value", None) is not None


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Leave all jobs at a normal exit. After an exception the other ranks learn at once that this one is lost."""
    for comm in list(_open):
        if comm._left or comm._core.is_forked:
            continue
        if has_failed():
            comm.cancel()
        else:
            comm.leave()

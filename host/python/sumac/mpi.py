"""The names and arguments of mpi4py's ``MPI.Comm``, for arrays.

Each method is one of :class:`sumac.Communicator` under the name that mpi4py has for it. Arguments are arrays, not lists
of an array and an MPI type; ``Alltoallv`` and ``Allgatherv`` take ``[array, counts]``. Methods in lower case, which
pickle objects, do not exist here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence, TypeAlias

from ._sumac import Request
from .types import ANY_SOURCE, IN_PLACE, Array, InPlace, ReduceOp

if TYPE_CHECKING:
    from . import _sumac
    from .communicator import Communicator

Counted: TypeAlias = "tuple[Array, Sequence[int]] | list[Array | Sequence[int]]"
"""An array and the length of each rank's block, in rank order, without gaps."""

Maybe: TypeAlias = "Array | InPlace | None"


class MpiMethods:
    """The methods of mpi4py's communicators."""

    _core: _sumac.Communicator

    def Get_rank(self) -> int:
        return self._core.rank

    def Get_size(self) -> int:
        return self._core.size

    def Barrier(self) -> None:
        self.Ibarrier().wait()

    def Ibarrier(self) -> Request:
        return self._core.start("barrier", None, None)

    def Bcast(self, buf: Array, root: int = 0) -> None:
        self.Ibcast(buf, root).wait()

    def Ibcast(self, buf: Array, root: int = 0) -> Request:
        return self._core.start("broadcast", None, buf, None, root)

    def Allreduce(self, sendbuf: Array | InPlace, recvbuf: Array, op: str = ReduceOp.SUM) -> None:
        self.Iallreduce(sendbuf, recvbuf, op).wait()

    def Iallreduce(self, sendbuf: Array | InPlace, recvbuf: Array, op: str = ReduceOp.SUM) -> Request:
        return self._core.start("all_reduce", _given(sendbuf), recvbuf, op)

    def Reduce(self, sendbuf: Array | InPlace, recvbuf: Array | None, op: str = ReduceOp.SUM, root: int = 0) -> None:
        self.Ireduce(sendbuf, recvbuf, op, root).wait()

    def Ireduce(
        self, sendbuf: Array | InPlace, recvbuf: Array | None, op: str = ReduceOp.SUM, root: int = 0
    ) -> Request:
        output = self._at_root(recvbuf, root)
        return self._core.start("reduce", self._not_in_place(sendbuf, root), output, op, root)

    def Reduce_scatter_block(self, sendbuf: Array | InPlace, recvbuf: Array, op: str = ReduceOp.SUM) -> None:
        self.Ireduce_scatter_block(sendbuf, recvbuf, op).wait()

    def Ireduce_scatter_block(self, sendbuf: Array | InPlace, recvbuf: Array, op: str = ReduceOp.SUM) -> Request:
        if isinstance(sendbuf, InPlace):
            raise NotImplementedError(
                "Reduce_scatter_block(IN_PLACE, ...) moves the result to the front of the buffer; "
                "reduce_scatter(x, op) leaves it where this rank's block is"
            )
        return self._core.start("reduce_scatter", sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Array | InPlace, recvbuf: Array) -> None:
        self.Iallgather(sendbuf, recvbuf).wait()

    def Iallgather(self, sendbuf: Array | InPlace, recvbuf: Array) -> Request:
        return self._core.start("all_gather", _given(sendbuf), recvbuf)

    def Gather(self, sendbuf: Array | InPlace, recvbuf: Array | None, root: int = 0) -> None:
        self.Igather(sendbuf, recvbuf, root).wait()

    def Igather(self, sendbuf: Array | InPlace, recvbuf: Array | None, root: int = 0) -> Request:
        output = self._at_root(recvbuf, root)
        return self._core.start("gather", self._not_in_place(sendbuf, root), output, None, root)

    def Scatter(self, sendbuf: Array | None, recvbuf: Array | InPlace, root: int = 0) -> None:
        self.Iscatter(sendbuf, recvbuf, root).wait()

    def Iscatter(self, sendbuf: Array | None, recvbuf: Array | InPlace, root: int = 0) -> Request:
        sent, received = self._at_root(sendbuf, root), self._not_in_place(recvbuf, root)
        if received is None:
            # In place at the root: its block stays where it is.
            sent, received = None, sent
        return self._core.start("scatter", sent, received, None, root)

    def Alltoall(self, sendbuf: Array | InPlace, recvbuf: Array) -> None:
        self.Ialltoall(sendbuf, recvbuf).wait()

    def Ialltoall(self, sendbuf: Array | InPlace, recvbuf: Array) -> Request:
        return self._core.start("all_to_all", _given(sendbuf), recvbuf)

    def Alltoallv(self, sendbuf: Counted, recvbuf: Counted) -> None:
        self.Ialltoallv(sendbuf, recvbuf).wait()

    def Ialltoallv(self, sendbuf: Counted, recvbuf: Counted) -> Request:
        return self._core.start_all_to_all_v(*_counted(sendbuf), *_counted(recvbuf))

    def Allgatherv(self, sendbuf: Array, recvbuf: Counted) -> None:
        self.Iallgatherv(sendbuf, recvbuf).wait()

    def Iallgatherv(self, sendbuf: Array, recvbuf: Counted) -> Request:
        return self._core.start_blocks_v(sendbuf, *_counted(recvbuf))

    def Reduce_scatter(
        self, sendbuf: Array, recvbuf: Array, recvcounts: Sequence[int], op: str = ReduceOp.SUM
    ) -> None:
        self.Ireduce_scatter(sendbuf, recvbuf, recvcounts, op).wait()

    def Ireduce_scatter(
        self, sendbuf: Array, recvbuf: Array, recvcounts: Sequence[int], op: str = ReduceOp.SUM
    ) -> Request:
        return self._core.start_blocks_v(sendbuf, recvbuf, list(recvcounts), op)

    def Send(self, buf: Array, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag).wait()

    def Isend(self, buf: Array, dest: int, tag: int = 0) -> Request:
        return self._core.start_send(buf, dest, tag)

    def Recv(self, buf: Array, source: int = ANY_SOURCE, tag: int = 0) -> None:
        self.Irecv(buf, source, tag).wait()

    def Irecv(self, buf: Array, source: int = ANY_SOURCE, tag: int = 0) -> Request:
        return self._core.start_receive(buf, None if source == ANY_SOURCE else source, tag)

    def Sendrecv(
        self, sendbuf: Array, dest: int, sendtag: int = 0, *, recvbuf: Array, source: int, recvtag: int = 0
    ) -> None:
        received = self.Irecv(recvbuf, source, recvtag)
        self.Isend(sendbuf, dest, sendtag).wait()
        received.wait()

    def Split(self, color: int | None = 0, key: int = 0) -> Communicator | None:
        raise NotImplementedError

    def Free(self) -> None:
        raise NotImplementedError

    def Abort(self) -> None:
        self._core.cancel()

    def _at_root(self, array: Array | None, root: int) -> Array | None:
        """Return a buffer that only the root has, where this is the root."""
        if self._core.rank != root:
            return None
        if array is None or isinstance(array, InPlace):
            raise TypeError("the root needs a buffer for the data of all ranks")
        return array

    def _not_in_place(self, array: Maybe, root: int) -> Array | None:
        """Return a buffer, or None for IN_PLACE, which only the root may pass."""
        if array is None or (isinstance(array, InPlace) and self._core.rank != root):
            raise TypeError("only the root can work in place")
        return _given(array)


def _given(array: Array | InPlace) -> Array | None:
    return None if isinstance(array, InPlace) else array


def _counted(spec: Counted) -> tuple[Array, list[int]]:
    if not isinstance(spec, (list, tuple)) or len(spec) != 2:
        raise TypeError("Alltoallv and Allgatherv take [array, counts], with the blocks behind each other in rank order")
    array, counts = spec
    return array, [int(count) for count in counts]  # type: ignore[return-value, union-attr]


__all__ = ["ANY_SOURCE", "IN_PLACE", "MpiMethods"]

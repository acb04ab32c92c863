"""Exceptions of Sumac: a class for each kind of error, with the error's data as attributes.

A call that raises an exception for which ``is_rejection`` is true had no effect: correct it and call again. Any other
exception of a call ends the communicator, and each later call raises :class:`EndedError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Operation:
    """The description of an operation."""

    collective: str
    dtype: str | None
    op: str | None
    root: int | None
    count: int

    def __str__(self) -> str:
        words = [self.collective]
        if self.dtype is not None:
            words += [self.dtype, *([self.op] if self.op else []), f"x {self.count}"]
        return " ".join(words) + ("" if self.root is None else f", root {self.root}")


class Error(RuntimeError):
    """Any error of Sumac."""

    is_rejection: ClassVar[bool] = False


class ArgumentError(Error, ValueError):
    """An argument is invalid. Nothing was sent."""

    is_rejection = True


class NotPossibleError(Error):
    """The requested path is not available. Nothing was sent."""

    is_rejection = True


class RegistrationError(Error, MemoryError):
    """Memory could not be registered with the leaf device. Ordinary arrays work as well."""

    is_rejection = True
    device: str
    len_bytes: int


class TooManyInFlightError(Error):
    """The limit of operations in flight is reached. Wait for one first."""

    is_rejection = True
    limit: int
    waited: float


class MismatchError(Error):
    """Ranks called different operations. All of them get this error."""

    first: Operation
    other: Operation


class RankLostError(Error):
    """The peer of a message is lost."""

    rank: int


class RanksFailedError(Error):
    """Ranks failed. All survivors get this error, and continue with ``shrink``.

    ``output`` lists the ranges of output elements that hold results; ``None`` means that the output is unspecified.
    """

    ranks: list[int]
    operation: int
    output: list[tuple[int, int]] | None


class PartitionedError(Error):
    """This rank reaches too few ranks to continue without a controller."""

    reachable: int
    size: int
    output: list[tuple[int, int]] | None


class OutcomeUnknownError(Error):
    """The ranks could not agree in time on whether the operation has completed."""

    operation: Operation
    waited: float
    output: list[tuple[int, int]] | None


class PathLostError(Error):
    """A device on the path to the tree's root stopped answering, and the communicator does not recover."""


class GroupLostError(Error):
    """A device of the tree no longer knows the job's group."""


class DeviceLostError(Error):
    """The leaf device is gone."""

    device: str


class DeviceError(Error):
    """The leaf device violated the protocol."""

    device: str


class StragglersError(Error):
    """Ranks did not enter an operation within its straggler limit."""

    missing: list[int]


class ExcludedError(Error):
    """This rank did not enter an operation in time, and the others go on without it."""


class DeadlineError(Error, TimeoutError):
    """The deadline of a call passed."""

    operation: Operation
    waited: float


class UnsupportedError(Error):
    """A device of the tree does not support the operation, although it had announced that it does."""

    operation: Operation


class HostCollectiveError(Error):
    """A host collective failed for another reason."""


class CancelledError(Error):
    """This rank's own program ended the communicator."""


class EndedError(Error):
    """An earlier call ended the communicator: ``cause`` is its error."""

    cause: Error


class LeftError(Error):
    """This rank has left the communicator."""


class ForkedError(Error):
    """This process was forked from the one that joined. Join a job from this process."""


class JoinError(Error):
    """The rank could not join its job."""


class SplitError(Error):
    """The communicator could not be split."""


class ShrinkError(Error):
    """The communicator could not be shrunk. Survivors can try again."""

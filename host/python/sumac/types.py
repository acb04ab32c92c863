"""Operators, options and the protocols of arrays."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypedDict, final

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SupportsDLPack(Protocol):
    """An array that DLPack describes."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


Array: TypeAlias = "Buffer | SupportsDLPack"
"""What operations take: contiguous memory of the host, by the buffer protocol or by DLPack, without a copy."""


class ReduceOp(StrEnum):
    """Operators of reductions. Calls take their names as well."""

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    PREMUL_SUM = "premul_sum"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    LAND = "land"
    LOR = "lor"
    LXOR = "lxor"
    MINLOC = "minloc"
    MAXLOC = "maxloc"


OpName: TypeAlias = (
    ReduceOp
    | Literal[
        "sum", "prod", "min", "max", "avg", "premul_sum", "band", "bor", "bxor", "land", "lor", "lxor", "minloc", "maxloc"
    ]
)


class Options(TypedDict, total=False):
    """Options of one call. All but ``scalar`` and ``deadline`` must be the same on all ranks."""

    algo: str
    """The algorithm, as ``auto``, ``tree`` or ``ring``. Default: the communicator's."""
    deadline: float
    """How long the call may take, in seconds."""
    scalar: float
    """The factor of this rank's contribution, for ``premul_sum``."""
    straggler: str
    """``wait``, ``deadline:SECONDS`` or ``partial:SECONDS``."""


@final
class InPlace:
    """The type of :data:`IN_PLACE`."""

    def __repr__(self) -> str:
        return "sumac.IN_PLACE"


ANY_SOURCE: Final = -1
"""In the place of a rank to receive from: whichever rank sends first, as ``MPI.ANY_SOURCE``."""

IN_PLACE: Final = InPlace()
"""In the place of a send or receive buffer: the other buffer is both, as ``MPI.IN_PLACE``."""

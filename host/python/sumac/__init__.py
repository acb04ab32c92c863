"""In-network collectives: all-reduce and its relatives between the ranks of a job, summed by devices in the network
where there are any, and by host collectives where not.

    import numpy as np
    import sumac

    with sumac.init() as comm:  # what torchrun, mpirun, srun or `sumac run` set
        x = np.full(1 << 20, comm.rank, dtype=np.float32)
        outcome = comm.all_reduce(x, "sum")
        print(x[0], outcome.path)

``init`` joins by the environment and keyword arguments. The methods of :class:`Communicator` take arrays of numpy,
torch and others, without a copy. Who comes from mpi4py finds ``comm.Allreduce(a, b, op=sumac.SUM)`` and its relatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from . import errors
from ._sumac import Outcome, Request, __version__
from ._sumac import join as _join
from .communicator import Candidate, Communicator, Explanation, wait_all
from .errors import Error
from .types import ANY_SOURCE, IN_PLACE, Array, Options, ReduceOp

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SUM: Final = ReduceOp.SUM
PROD: Final = ReduceOp.PROD
MIN: Final = ReduceOp.MIN
MAX: Final = ReduceOp.MAX
AVG: Final = ReduceOp.AVG
BAND: Final = ReduceOp.BAND
BOR: Final = ReduceOp.BOR
BXOR: Final = ReduceOp.BXOR
LAND: Final = ReduceOp.LAND
LOR: Final = ReduceOp.LOR
LXOR: Final = ReduceOp.LXOR
MINLOC: Final = ReduceOp.MINLOC
MAXLOC: Final = ReduceOp.MAXLOC

_world: Communicator | None = None


def init(
    *,
    controller: str | None = None,
    job: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    key: str | None = None,
    **settings: Any,
) -> Communicator:
    """Join a job, and wait until all its ranks have joined.

    The environment says which rank of which job this is, and where the controller is: ``RANK``, ``WORLD_SIZE`` or what
    other launchers set, and variables that begin with ``SUMAC_``. Arguments replace what it says; with job, rank and
    world no launcher is needed. ``controller`` is ``HOST:PORT``. Further settings have the names of the fields of Rust's
    ``JoinConfig``, as ``order="fold"`` or ``deadline=10``; times are in seconds.

    The first communicator of the process is the one that :func:`empty` uses.
    """
    global _world
    core = _join(controller=controller, job=job, rank=rank, world=world, key=key, **settings)
    comm = Communicator(core)
    if _world is None or _world._left or _world._core.is_forked:
        _world = comm
    return comm


def world() -> Communicator:
    """Return the communicator that :func:`init` made first."""
    if _world is None:
        raise Error("there is no communicator: call sumac.init() first")
    return _world


def empty(
    shape: int | Sequence[int], dtype: npt.DTypeLike = "float32", *, comm: Communicator | None = None
) -> np.ndarray[Any, Any]:
    """Return a zeroed numpy array on registered memory of ``comm``, or of the first communicator that was made.

    Where the rank shares memory with its leaf device, operations on the array are zero-copy. The memory lives as
    long as any view of it."""
    return (comm or world()).empty(shape, dtype)


__all__ = [
    "ANY_SOURCE", "AVG", "BAND", "BOR", "BXOR", "IN_PLACE", "LAND", "LOR", "LXOR", "MAX", "MAXLOC", "MIN", "MINLOC", "PROD",
    "SUM",
    "Array", "Candidate", "Communicator", "Error", "Explanation", "Options", "Outcome", "ReduceOp", "Request",
    "__version__", "empty", "errors", "init", "wait_all", "world",
]

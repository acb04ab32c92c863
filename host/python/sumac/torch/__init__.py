"""The backend ``sumac`` of ``torch.distributed``, on tensors in host memory.

    torch.distributed.init_process_group("sumac")                   # or "cpu:sumac,cuda:nccl"

torch finds the backend by its entry point; where it does not look for those, ``import sumac.torch`` first. The ranks meet
by the store of ``init_process_group``: rank 0 puts the controller's address, the job's name and a key there. Without
``SUMAC_CONTROLLER``, rank 0 runs a controller for the job, which has no devices: operations are host collectives, and
:func:`explain` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if not hasattr(torch._C._distributed_c10d, "Backend"):
    # Before 2.0 a backend is a ProcessGroup, one for all devices, whose operations C++ dispatches.
    raise ImportError(f"sumac.torch needs torch 2.15, whose c10d.Backend Python can subclass; torch {torch.__version__} has none")

from ..communicator import Explanation
from . import adapter
from .backend import SumacBackend, create

if TYPE_CHECKING:
    from ..communicator import Communicator

NAME = "sumac"


@dataclass(frozen=True)
class GroupExplanation(Explanation):
    """Which path an operation of a process group would take, and whether the adapter in C++ is there."""

    adapter: str


def register() -> None:
    """Register the backend with ``torch.distributed``. More than once has no effect."""
    if not hasattr(dist.Backend, NAME.upper()):
        # CUDA too, so that a tensor there gets an error that says what to do.
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def backend(group: dist.ProcessGroup | None = None) -> SumacBackend:
    """Return the backend of a process group; by default, of the whole job."""
    found = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    # The adapter in C++ has the backend within.
    found = getattr(found, "inner", found)
    if not isinstance(found, SumacBackend):
        raise TypeError(f"the group's backend for tensors in host memory is {type(found).__name__}, not sumac")
    return found


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return the communicator of a process group, for calls that c10d does not have."""
    return backend(group).communicator


def explain(
    group: dist.ProcessGroup | None = None, numel: int = 1 << 20, dtype: torch.dtype = torch.float32
) -> GroupExplanation:
    """Explain which path an all-reduce of so many elements takes, each candidate's cost, why not the tree, and whether
    works of c10d tell whether they have completed: that needs the adapter in C++."""
    found = backend(group).explain(numel, dtype)
    status = adapter.load()[1]
    return GroupExplanation(f"{found.text}\nadapter in C++: {status}", found.chosen, found.candidates, status)


def empty(
    *shape: int | Sequence[int], dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return a zeroed tensor on registered memory: where the rank shares memory with its leaf device, operations on it
    are zero-copy. The memory lives as long as any view of it."""
    return backend(group).empty(torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape), dtype)  # type: ignore[arg-type]


register()

__all__ = ["NAME", "GroupExplanation", "SumacBackend", "backend", "communicator", "empty", "explain", "register"]

"""Tensors as the memory that operations take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._sumac import Region

DTYPES = {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.uint32: "u32",
    torch.int64: "i64",
    torch.uint64: "u64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}

_OPERATORS = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "PREMUL_SUM": "premul_sum",
}

# A sum of booleans is true if any is, as in gloo.
_BOOLEAN = {"sum": "lor", "max": "lor", "bor": "lor", "prod": "land", "min": "land", "band": "land", "bxor": "lxor"}


def check(tensor: torch.Tensor) -> torch.Tensor:
    """Check that a tensor is dense and in host memory."""
    if tensor.device.type != "cpu":
        raise NotImplementedError(
            f"a tensor on {tensor.device}: sumac takes tensors in host memory; "
            'use init_process_group("cpu:sumac,cuda:nccl"), or copy it with .cpu()'
        )
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"a tensor of layout {tensor.layout}: sumac takes dense tensors; use .to_dense()")
    return tensor


def memory(tensor: torch.Tensor, *, moves: bool) -> Region:
    """Return the memory of a contiguous tensor. Operations that only move elements take any type, as bytes."""
    name = DTYPES.get(tensor.dtype)
    if name is None:
        if not moves:
            raise NotImplementedError(f"a reduction of {tensor.dtype}: sumac reduces {', '.join(DTYPES.values())}")
        name = "u8"
    # Safe: the tensor is contiguous, and it keeps its storage; nobody resizes a tensor that an operation uses.
    return Region._at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), name, tensor)


def operator(op: Any, tensor: torch.Tensor) -> tuple[str, dict[str, float]]:
    """Return the name of c10d's operator and the options of the call."""
    kind = getattr(op, "op", op)
    name = _OPERATORS.get(kind.name)
    if name is None:
        raise NotImplementedError(f"the operator {kind.name}")
    options: dict[str, float] = {}
    if tensor.dtype == torch.bool:
        if name not in _BOOLEAN:
            raise NotImplementedError(f"the operator {kind.name} on booleans")
        name = _BOOLEAN[name]
    if name == "premul_sum":
        factor = op.factor
        options["scalar"] = float(factor if not isinstance(factor, torch.Tensor) else factor.item())
    return name, options


class Output:
    """A contiguous tensor to write to, and what copies it to where the caller wants it."""

    def __init__(self, tensor: torch.Tensor, *, keeps: bool = True) -> None:
        check(tensor)
        self.tensor = tensor
        self.copy: Callable[[], object] | None = None
        # A lazy conjugate or negative has other bits in memory.
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            self.tensor = tensor.contiguous().resolve_conj().resolve_neg() if keeps else torch.empty_like(
                tensor, memory_format=torch.contiguous_format
            )
            self.copy = lambda: tensor.copy_(self.tensor)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to read, contiguous in memory."""
    return check(tensor).contiguous().resolve_conj().resolve_neg()


class OutputList:
    """Tensors to write to, one behind the other in memory: where they are already, or in a copy."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        first = tensors[0]
        self.copy: Callable[[], object] | None = None
        if are_adjacent(tensors):
            self.memory_len = sum(tensor.numel() for tensor in tensors)
            self.tensor = first.as_strided((self.memory_len,), (1,))
            return
        sizes = [check(tensor).numel() for tensor in tensors]
        self.tensor = torch.empty(sum(sizes), dtype=first.dtype)
        parts = torch.split(self.tensor, sizes)

        def copy() -> None:
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

        self.copy = copy


def are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors lie behind each other in one allocation, as views of one tensor do."""
    first = tensors[0]
    end = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        check(tensor)
        is_next = tensor.is_contiguous() and tensor.data_ptr() == end and tensor.dtype == first.dtype
        if not is_next or tensor.untyped_storage().data_ptr() != storage or tensor.is_conj() or tensor.is_neg():
            return False
        end += tensor.numel() * tensor.element_size()
    return True


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one behind the other: a view if they are so already, or else a copy."""
    if are_adjacent(tensors):
        return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
    return torch.cat([contiguous(tensor).reshape(-1) for tensor in tensors])

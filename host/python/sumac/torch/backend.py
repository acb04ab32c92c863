"""The backend: each operation of c10d as one or more of a communicator."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from .._sumac import Request
from ..communicator import Communicator, Explanation, has_failed
from ..errors import Error
from . import adapter
from .rendezvous import close_controllers, join
from .tensors import DTYPES, Output, OutputList, check, contiguous, joined, memory, operator
from .work import SumacWork

NO_TIMEOUT = timedelta(0)

# What c10d holds of a Python backend is its C++ part alone.
_open: dict[int, SumacBackend] = {}


def create(options: Any, _backend_options: object) -> Backend:
    """Make the backend of a process group, as torch asks for it: within the adapter in C++, if there is one."""
    backend = SumacBackend(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)
    module = adapter.load()[0]
    found: Backend = backend if module is None else module.Backend(backend)
    return found


class SumacBackend(Backend):
    """The operations of a process group on tensors in host memory."""

    supports_splitting = True
    supports_coalescing = False

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, group_name: str = "") -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._group_name = group_name
        self._calls = 0
        self._monitored = 0
        self._coalesced: list[SumacWork] | None = None
        try:
            self.communicator: Communicator = join(store, rank, size, timeout)
        except Error as error:
            raise dist.DistBackendError(f"rank {rank}: joining group {group_name!r}: {error}") from error
        _open[id(self)] = self

    def getBackendName(self) -> str:
        return "sumac"

    @property
    def options(self) -> Any:
        options: Any = Backend.Options("sumac", self._timeout)
        options.group_name = self._group_name
        return options

    # Reductions.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> SumacWork:
        if any(tensor.layout == torch.sparse_coo for tensor in tensors):
            return self.allreduce_sparse(tensors, opts)
        return self._all_reduces("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> SumacWork:
        return self._all_reduces("all_reduce_coalesced", tensors, opts)

    def _all_reduces(self, what: str, tensors: list[torch.Tensor], opts: Any) -> SumacWork:
        outputs = [Output(tensor) for tensor in tensors]
        requests = [self._reduction("all_reduce", None, output.tensor, opts) for output in outputs]
        return self._work(what, requests, tensors, outputs)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> SumacWork:
        (tensor,) = tensors
        root = opts.rootRank
        if self._rank != root:
            request = self._reduction("reduce", contiguous(tensor), None, opts, root)
            return self._work("reduce", [request], tensors)
        output = Output(tensor)
        return self._work("reduce", [self._reduction("reduce", None, output.tensor, opts, root)], tensors, [output])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> SumacWork:
        (output,), (parts,) = outputs, inputs
        target = Output(output, keeps=False)
        if len({part.numel() for part in parts}) == 1:
            request = self._reduction("reduce_scatter", joined(parts), target.tensor, opts)
            return self._work("reduce_scatter", [request], outputs, [target])
        requests = []
        for root, part in enumerate(parts):
            own = target.tensor if root == self._rank else None
            requests.append(self._reduction("reduce", contiguous(part), own, opts, root))
        return self._work("reduce_scatter", requests, outputs, [target])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> SumacWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> SumacWork:
        targets = [Output(output, keeps=False) for output in outputs]
        requests = [
            self._reduction("reduce_scatter", contiguous(input), target.tensor, opts)
            for target, input in zip(targets, inputs, strict=True)
        ]
        return self._work("reduce_scatter_single", requests, outputs, targets)

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> SumacWork:
        """Sum sparse tensors: every rank gets all ranks' elements, and adds them up in the order of the ranks."""
        (tensor,) = tensors
        if operator(opts.reduceOp, tensor)[0] != "sum":
            name = getattr(opts.reduceOp, "op", opts.reduceOp).name
            raise NotImplementedError(f"the operator {name} on sparse tensors: sumac sums them")
        mine = tensor.coalesce()
        count = torch.tensor([mine._nnz()])
        counts = torch.empty(self._size, dtype=torch.int64)
        self.all_gather_single(counts, count, opts).wait()
        parts = []
        for own in (mine.indices().t().contiguous(), mine.values()):
            shape = own.shape[1:]
            lists = [own.new_empty(int(each), *shape) for each in counts]
            self.allgather([lists], [own], opts).wait()
            parts.append(torch.cat(lists))
        total = torch.sparse_coo_tensor(parts[0].t(), parts[1], tensor.shape).coalesce()
        tensor.copy_(total)
        return self._work("all_reduce_sparse", [], tensors)

    # Data movement.

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> SumacWork:
        outputs = [Output(tensor) for tensor in tensors]
        requests = [self._movement("broadcast", None, output.tensor, opts, opts.rootRank) for output in outputs]
        return self._work("broadcast", requests, tensors, outputs)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> SumacWork:
        # Here the outer list is that of the ranks.
        if len(outputs) != self._size or any(len(parts) != len(inputs) for parts in outputs):
            raise ValueError(f"all_gather_coalesced: not {len(inputs)} tensors for each of {self._size} ranks")
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> SumacWork:
        requests: list[Request] = []
        targets: list[Output | OutputList] = []
        for parts, input in zip(outputs, inputs, strict=True):
            self._check_list("all_gather", parts)
            if len({part.numel() for part in parts}) == 1:
                whole = OutputList(parts)
                targets.append(whole)
                requests.append(self._movement("all_gather", contiguous(input), whole.tensor, opts))
                continue
            for root, part in enumerate(parts):
                if root == self._rank:
                    part.copy_(input.view(part.shape))
                target = Output(part)
                targets.append(target)
                requests.append(self._movement("broadcast", None, target.tensor, opts, root))
        return self._work("all_gather", requests, outputs, targets)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> SumacWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> SumacWork:
        targets = [Output(output, keeps=False) for output in outputs]
        requests = [
            self._movement("all_gather", contiguous(input), target.tensor, opts)
            for target, input in zip(targets, inputs, strict=True)
        ]
        return self._work("all_gather_single", requests, outputs, targets)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> SumacWork:
        (input,) = inputs
        if self._rank != opts.rootRank:
            request = self._movement("gather", contiguous(input), None, opts, opts.rootRank)
            return self._work("gather", [request], outputs)
        (parts,) = outputs
        self._check_list("gather", parts)
        whole = OutputList(parts)
        request = self._movement("gather", contiguous(input), whole.tensor, opts, opts.rootRank)
        return self._work("gather", [request], outputs, [whole])

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> SumacWork:
        (output,) = outputs
        target = Output(output, keeps=False)
        whole = None
        if self._rank == opts.rootRank:
            (parts,) = inputs
            self._check_list("scatter", parts)
            whole = joined(parts)
        request = self._movement("scatter", whole, target.tensor, opts, opts.rootRank)
        return self._work("scatter", [request], outputs, [target])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> SumacWork:
        target = Output(output, keeps=False)
        counts = self._counts(input, input_splits), self._counts(output, output_splits)
        request = self._exchange(contiguous(input), counts[0], target.tensor, counts[1])
        return self._work("all_to_all_single", [request], [output], [target])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> SumacWork:
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)
        whole = OutputList(outputs)
        counts = [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs]
        request = self._exchange(joined(inputs), counts[0], whole.tensor, counts[1])
        return self._work("all_to_all", [request], outputs, [whole])

    # Messages and barriers.

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> SumacWork:
        (tensor,) = tensors
        request = self._started(self._core.start_send, memory(contiguous(tensor), moves=True), dst, tag)
        return self._work("send", [request], tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> SumacWork:
        (tensor,) = tensors
        target = Output(tensor, keeps=False)
        request = self._started(self._core.start_receive, memory(target.tensor, moves=True), src, tag)
        return self._work("recv", [request], tensors, [target])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> SumacWork:
        if adapter.load()[0] is None:
            raise NotImplementedError(
                "recv from any source: torch cannot learn from a backend in Python who sent; name the rank to receive "
                f"from, or build the adapter in C++: {adapter.COMMAND}"
            )
        (tensor,) = tensors
        target = Output(tensor, keeps=False)
        request = self._started(self._core.start_receive, memory(target.tensor, moves=True), None, tag)
        return self._work("recv", [request], tensors, [target])

    def barrier(self, opts: Any) -> SumacWork:
        request = self._started(self._core.start, "barrier", None, None, None, 0, self._limits(opts))
        return self._work("barrier", [request], [])

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 names those that do not come. By the store, so that the group stays usable."""
        number, self._monitored = self._monitored, self._monitored + 1
        timeout = self._timeout if opts.timeout < NO_TIMEOUT else opts.timeout
        name = f"sumac/{self.communicator.name}/monitored/{number}"
        if self._rank != 0:
            self._store.set(f"{name}/{self._rank}", "here")
            try:
                self._store.wait([f"{name}/done"], timeout)
                error = self._store.get(f"{name}/done").decode()
            except dist.DistStoreError:
                error = "it did not come"
            if error:
                # What programs look for, by gloo's words.
                raise RuntimeError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: {error}"
                )
            return
        end = time.monotonic() + timeout.total_seconds()
        missing: list[int] = []
        if timeout == NO_TIMEOUT:
            self._fail_monitored(name, "Rank 0 timed out in monitoredBarrier after 0 ms")
        for rank in range(1, self._size):
            left = timedelta(seconds=max(end - time.monotonic(), 0.001))
            try:
                self._store.wait([f"{name}/{rank}"], left)
            except Exception:
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            millis = int(timeout.total_seconds() * 1000)
            who = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
            self._fail_monitored(name, f"{who} failed to pass monitoredBarrier in {millis} ms")
        self._store.set(f"{name}/done", "")

    def _fail_monitored(self, name: str, error: str) -> NoReturn:
        """Fail a monitored barrier at rank 0, and report that to the ranks that wait for it."""
        self._store.set(f"{name}/done", error)
        raise RuntimeError(error)

    # What c10d asks beside operations.

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> SumacWork | None:
        works, self._coalesced = self._coalesced or [], None
        if not works:
            return None
        requests = [request for work in works for request in work._requests]

        def finish() -> None:
            # Each has a callback of its own that came first.
            for work in works:
                if work._finish is not None:
                    work._finished.wait()

        return SumacWork("coalesced", self._rank, requests, [work._result for work in works], finish)

    def split(self, store: Store, ranks: list[int], opts: Any) -> SumacBackend:
        timeout = getattr(opts, "_timeout", self._timeout)
        name = getattr(opts, "group_name", "")
        return SumacBackend(store, ranks.index(self._rank), len(ranks), timeout, name)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        self._calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def abort(self) -> None:
        """End all operations; they fail, and the other ranks see this one as lost."""
        _open.pop(id(self), None)
        self.communicator._left = True
        self.communicator.cancel()

    def shutdown(self) -> None:
        """Leave the group, after all operations that this rank has started."""
        if _open.pop(id(self), None) is not None and not self.communicator._core.is_forked:
            self.communicator.leave()
            if not _open:
                close_controllers()

    def explain(self, numel: int, dtype: torch.dtype) -> Explanation:
        """Explain which path an all-reduce of so many elements takes."""
        return self.communicator.explain("all_reduce", numel, DTYPES[dtype], "sum")

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor on registered memory."""
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        found = self._core.alloc(shape.numel() * dtype.itemsize)
        return torch.frombuffer(found, dtype=dtype).view(shape)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether :meth:`allocate_tensor` has memory for a device."""
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a zeroed tensor of one dimension on registered memory."""
        if not self.supports_tensor_alloc(device):
            raise NotImplementedError(f"allocate_tensor on {device}: sumac registers memory of the host")
        return self.empty(torch.Size([size]), dtype)

    # How operations are started.

    @property
    def _core(self) -> Any:
        return self.communicator._core

    def _started(self, start: Callable[..., Request], *arguments: Any) -> Request:
        """Start an operation, whose refusal is c10d's error."""
        try:
            return start(*arguments)
        except Error as error:
            raise dist.DistBackendError(f"rank {self._rank}: {error}") from error

    def _limits(self, opts: Any) -> dict[str, Any]:
        timeout = opts.timeout.total_seconds()
        return {"deadline": timeout if timeout > 0 else self._timeout.total_seconds()}

    def _reduction(
        self, name: str, input: torch.Tensor | None, output: torch.Tensor | None, opts: Any, root: int = 0
    ) -> Request:
        tensor = input if input is not None else output
        assert tensor is not None
        op, options = operator(opts.reduceOp, tensor)
        arrays = (None if each is None else memory(each, moves=False) for each in (input, output))
        request: Request = self._started(self._core.start, name, *arrays, op, root, {**options, **self._limits(opts)})
        return request

    def _movement(
        self, name: str, input: torch.Tensor | None, output: torch.Tensor | None, opts: Any, root: int = 0
    ) -> Request:
        arrays = (None if each is None else memory(each, moves=True) for each in (input, output))
        request: Request = self._started(self._core.start, name, *arrays, None, root, self._limits(opts))
        return request

    def _exchange(
        self, input: torch.Tensor, send: list[int], output: torch.Tensor, receive: list[int]
    ) -> Request:
        """Start an all-to-all. Always by counts: one rank may give splits where another leaves them out."""
        source, target = memory(input, moves=True), memory(output, moves=True)
        # Types that sumac does not have are moved as bytes.
        scale = input.element_size() if source.dtype == "u8" else 1
        scaled = [[count * scale for count in counts] for counts in (send, receive)]
        request: Request = self._started(self._core.start_all_to_all_v, source, scaled[0], target, scaled[1])
        return request

    def _counts(self, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """Return the number of elements for or from each rank."""
        if not splits:
            rows = tensor.size(0) if tensor.dim() else 1
            if rows % self._size:
                raise ValueError(f"{rows} rows are not {self._size} equal parts; give the splits")
            return [tensor.numel() // self._size] * self._size
        rows = tensor.size(0) if tensor.dim() else 0
        if len(splits) != self._size or sum(splits) != rows:
            raise ValueError(f"splits {splits} are not {self._size} parts of {rows} rows")
        return [split * (tensor.numel() // rows if rows else 0) for split in splits]

    def _check_list(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{what}: {len(tensors)} tensors for {self._size} ranks")
        for tensor in tensors:
            check(tensor)

    def _work(
        self,
        what: str,
        requests: list[Request],
        result: Any,
        outputs: Sequence[Output | OutputList] = (),
    ) -> SumacWork:
        copies: list[Callable[[], object]] = [output.copy for output in outputs if output.copy is not None]

        def finish() -> None:
            for copy in copies:
                copy()

        self._calls += 1
        work = SumacWork(what, self._rank, requests, result, finish if copies else None)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


@atexit.register
def _leave_all() -> None:
    """Leave all groups at a normal exit, the last one created first."""
    for backend in reversed(list(_open.values())):
        if has_failed():
            backend.abort()
        else:
            backend.shutdown()

"""Operations in flight, as c10d sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from .._sumac import Request
from ..errors import DeadlineError, Error


class SumacWork(dist.Work):
    """One or more operations of a communicator that run by themselves.

    torch hands ``wait`` and ``get_future`` of a Python ``Work`` through, and no more; the adapter in C++ hands through the
    rest. Without it, ``is_completed`` of what a program gets stays false, and ``get_future().done()`` says it.
    """

    def __init__(
        self,
        what: str,
        rank: int,
        requests: Sequence[Request],
        result: Any,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._what, self._rank, self._requests, self._result = what, rank, requests, result
        self._future: torch.futures.Future[Any] | None = None
        self._finish, self._finished = finish, threading.Event()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        if finish is not None:
            self._when_done(self._run_finish)

    def _when_done(self, callback: Callable[[], None]) -> None:
        left = len(self._requests)
        if left == 0:
            callback()

        def count_down() -> None:
            nonlocal left
            with self._lock:
                left -= 1
                is_last = left == 0
            if is_last:
                callback()

        for request in self._requests:
            request.add_done_callback(count_down)

    def _run_finish(self) -> None:
        """Copy the result to where the caller wants it, on the thread that completes the operation."""
        try:
            if self._error() is None and self._finish is not None:
                self._finish()
        except Exception as error:
            self._failure = error
        finally:
            self._finish = None
            self._finished.set()

    def _error(self) -> Exception | None:
        """Return the error of operations that have ended, the first one's."""
        for request in self._requests:
            try:
                request.wait()
            except Error as error:
                return self._as_torch(error)
        return self._failure

    def _as_torch(self, error: Exception) -> dist.DistBackendError:
        # Programs look for the word.
        kind = "its timeout has passed: " if isinstance(error, DeadlineError) else ""
        raised = dist.DistBackendError(f"rank {self._rank}: {self._what}: {kind}{error}")
        raised.__cause__ = error
        return raised

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() or None
        for request in self._requests:
            try:
                request.wait(limit)
            except Error:
                pass
            except TimeoutError as error:
                raise self._as_torch(error) from error
        if self._finish is not None:
            self._finished.wait()
        failure = self._error()
        if failure is not None:
            raise failure
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            is_new = self._future is None
            if self._future is None:
                self._future = torch.futures.Future()
            future = self._future
        if is_new:
            self._when_done(self._set_future)
        return future

    def _set_future(self) -> None:
        if self._finish is not None:
            self._finished.wait()
        assert self._future is not None
        error = self._error()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        return all(request.test() for request in self._requests) and (self._finish is None or self._finished.is_set())

    def is_success(self) -> bool:
        return self.is_completed() and self._error() is None

    def exception(self) -> Exception | None:
        return self._error() if self.is_completed() else None

    def result(self) -> Any:
        self.wait()
        return self._result

    def result_tensors(self) -> list[torch.Tensor]:
        """Return the result as c10d's C++ does: one list."""
        return [leaf for leaf in tree_leaves(self.result()) if isinstance(leaf, torch.Tensor)]

    def source_rank(self) -> int:
        """Return the rank that sent the message, once it has been waited for."""
        source = self._requests[0].source if self._requests else None
        if source is None:
            raise RuntimeError(f"{self._what}: there is no message, or it has not been waited for")
        return source

    def synchronize(self) -> None:
        self.wait()

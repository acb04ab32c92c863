"""Ranks of tests: functions of the test modules that run in processes of their own."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def command(function: Callable[..., object], *arguments: object) -> list[str]:
    """Return the command that calls a function of a test module."""
    path = f"import sys; sys.path.insert(0, {str(HERE)!r})"
    call = f"import {function.__module__} as module; module.{function.__name__}(*{arguments!r})"
    return [sys.executable, "-c", f"{path}; {call}"]


@pytest.fixture
def run_ranks(sumac_cluster):
    """Run a function as each rank of a new job on a cluster, and return what the ranks print."""

    def run(function, *arguments, ranks=2, check=True, env=None, **shape):
        ended = sumac_cluster(ranks, **shape).run(command(function, *arguments), env=env)
        if check:
            for number, rank in enumerate(ended):
                assert rank.returncode == 0, f"rank {number}: {rank.stdout}{rank.stderr}"
        return ended

    return run

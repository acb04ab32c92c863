"""Ranks of tests of the torch backend: functions of the test modules, in processes of their own, that meet by a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """Build the adapter in C++, and return the folder that has it."""
    folder = tmp_path_factory.mktemp("adapter")
    env = {**os.environ, "SUMAC_TORCH_ADAPTER": str(folder)}
    subprocess.run([sys.executable, "-P", "-m", "sumac.torch", "build"], env=env, check=True)
    return folder


@pytest.fixture
def run_ranks(tmp_path):
    """Run a function as each rank of a process group of the backend sumac, and return what the ranks print."""

    def run(function, *arguments, ranks=2, check=True, env=None, timeout=120, beside=lambda: None, adapter=None):
        (tmp_path / "store").unlink(missing_ok=True)
        path = f"import sys; sys.path.insert(0, {str(HERE)!r})"
        call = f"import conftest, {function.__module__} as module; conftest.rank(module.{function.__name__}, *{arguments!r})"
        started = []
        for rank in range(ranks):
            own = {**os.environ, **(env or {}), "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            own |= {"SUMAC_TEST_STORE": str(tmp_path / "store"), "SUMAC_LOG": "off"}
            own["SUMAC_TORCH_ADAPTER"] = str(adapter or tmp_path / "no adapter")
            command = [sys.executable, "-P", "-c", f"{path}; {call}"]
            started.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        ended = []
        try:
            beside()
            for number, process in enumerate(started):
                out, error = process.communicate(timeout=timeout)
                assert not check or process.returncode == 0, f"rank {number}: {out}{error}"
                ended.append((process.returncode, out, error))
        finally:
            for process in started:
                process.kill()
                process.wait()
        return ended

    return run


def rank(function, *arguments):
    """Run a test's function in a process group."""
    import torch.distributed as dist

    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['SUMAC_TEST_STORE']}"
    dist.init_process_group("sumac", init_method=store, rank=number, world_size=size)
    function(*arguments)
    if dist.is_initialized():
        dist.destroy_process_group()

"""torch's own tests of its backends, from its wheel, on the backend sumac, with gloo's run of the same tests beside it.

    python suite.py                     run what suite.txt says is run, and compare with it
    python suite.py --match 'gather'    those whose name matches
    python suite.py --write             run all, and write suite.txt

The adapter in C++ must have been built (python -m sumac.torch build): some tests ask works whether they have completed.

suite.txt has one line for each test: its name, what gloo does and what sumac does: `passed`, or `skipped` and the reason.
gloo's reasons are torch's. The reason why a test is skipped for sumac alone is written by hand, and names what c10d lacks. A
test that does something else than its line fails the run.

The ranks of a test are forked from a process that has imported torch, as starting each anew takes seconds.
"""

import argparse
import concurrent.futures
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
BACKENDS = ("gloo", "sumac")
RANKS = 4
"""Some of the tests need four."""
LIMIT = 60
"""How long a test may take, in seconds. Most take less than one."""


class Name(str):
    """The name of a backend for which tests do what they do for gloo, where they ask."""

    def __eq__(self, other):
        return str.__eq__(self, other) or other == "gloo"

    def __hash__(self):
        return str.__hash__(self)


def prepared(backend):
    """Return torch's tests of backends, on a backend. Once per process."""
    # torch decides by this variable which tests apply. Those are gloo's here, on every backend.
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT)}
    os.environ |= {"OMP_NUM_THREADS": "1", "SUMAC_LOG": "off", "MASTER_ADDR": "127.0.0.1"}
    os.environ["INIT_METHOD"] = f"file://{tempfile.mktemp()}"
    import torch
    from torch.testing._internal.distributed import distributed_test

    if backend == "sumac":
        import sumac.torch  # noqa: F401
    # Tests of groups are for 8 ranks or more, but for MPI; 4 are enough for them.
    os.environ["BACKEND"] = "mpi"
    distributed_test.BACKEND = Name(backend)

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # A forked child does not inherit what torch's threads have done.
            torch.set_num_threads(1)
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Tests


class Result(unittest.TestResult):
    """What a test did."""

    text = "passed"

    def addSkip(self, test, reason):
        self.text = f"skipped: {' '.join(reason.split())}"

    def addFailure(self, test, error):
        self.text = f"failed: {self._exc_info_to_string(error, test)}"

    addError = addFailure


def run_here(backend):
    """Run the tests that standard input names, and print a line about each. The ranks' own output goes to its pipe."""
    tests = prepared(backend)
    answers = os.fdopen(os.dup(1), "w")
    for name in sys.stdin:
        result, begin = Result(), time.monotonic()
        output = os.memfd_create("output")
        for stream in (1, 2):
            os.dup2(output, stream)
        with contextlib.redirect_stdout(io.TextIOWrapper(os.fdopen(os.dup(1), "wb", 0), write_through=True)):
            tests(name.strip()).run(result)
        if result.text.startswith("failed"):
            os.lseek(output, 0, os.SEEK_SET)
            with os.fdopen(os.dup(output), errors="replace") as printed:
                result.text += printed.read()
        os.close(output)
        print(json.dumps((result.text, time.monotonic() - begin)), file=answers, flush=True)


class Runner:
    """A process that runs tests on a backend."""

    def __init__(self, backend):
        self.backend = backend
        command = [sys.executable, "-P", __file__, "--here", backend]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def run(self, name, report):
        """Return what a test did, and report it with the time that it took, in seconds."""
        print(name, file=self.process.stdin, flush=True)
        text, seconds = json.loads(self.process.stdout.readline())
        report(name, self.backend, text, seconds)
        return text

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def listed():
    """Return the list: by name, what gloo does, what sumac does."""
    lines = (line for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
    return {name: (gloo, sumac) for name, gloo, sumac in (line.split("\t") for line in lines)}


def run_share(names, expected, is_new, report):
    """Run some of the tests on both backends. Those that the list has as skipped are run only for a new list, on gloo."""
    runners = {backend: Runner(backend) for backend in BACKENDS}
    found = {}
    for name in names:
        theirs, ours = expected.get(name, ("", ""))
        if is_new or not theirs.startswith("skipped"):
            theirs = runners["gloo"].run(name, report)
        if theirs.startswith("skipped"):
            ours = theirs
        # A reason that is gloo's no more is not sumac's.
        elif not ours.startswith("skipped") or ours == expected[name][0]:
            ours = runners["sumac"].run(name, report)
        found[name] = theirs, ours
    for runner in runners.values():
        runner.close()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="a regular expression for the names of tests to run")
    parser.add_argument("--write", action="store_true", help="write the list; reasons for sumac are kept")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many tests run at a time")
    parser.add_argument("--verbose", action="store_true", help="print each test")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        return run_here(args.here)
    begin = time.monotonic()
    expected = listed() if LIST.exists() else {}
    names = [name for name in unittest.TestLoader().getTestCaseNames(prepared("gloo")) if re.search(args.match, name)]

    def report(name, backend, text, seconds):
        if args.verbose or text.startswith("failed"):
            print(f"{backend} {seconds:5.1f} s {name}: {text}", flush=True)

    found = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        shares = [names[first :: args.jobs] for first in range(args.jobs)]
        for share in pool.map(lambda share: run_share(share, expected, args.write, report), shares):
            found |= share
    if args.write:
        lines = LIST.read_text().splitlines() if LIST.exists() else []
        comments = [line for line in lines if line.startswith("#")]
        # What fails stays as it was, or out of the list.
        settled = {name: both for name, both in found.items() if not any(text.startswith("failed") for text in both)}
        rows = ["\t".join((name, *results)) for name, results in sorted((expected | settled).items())]
        LIST.write_text("\n".join(comments + rows) + "\n")
    gone = [] if args.match else [name for name in expected if name not in found]
    changed = [name for name, results in found.items() if expected.get(name) != results]
    for name in changed + gone:
        print(f"{name}: expected {expected.get(name)}, found {tuple(text[:200] for text in found.get(name, ()))}")
    passed = [sum(results[number] == "passed" for results in found.values()) for number in range(len(BACKENDS))]
    seconds = time.monotonic() - begin
    print(f"{len(found)} tests on {RANKS} ranks: gloo passes {passed[0]}, sumac {passed[1]}; {seconds:.0f} s")
    return 1 if changed or gone else 0


if __name__ == "__main__":
    sys.exit(main())

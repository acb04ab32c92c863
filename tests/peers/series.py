"""The series to compare: their variants, and the commands that measure them."""

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable

import process

# Values of Open MPI's parameter coll_tuned_allreduce_algorithm.
OPENMPI_TUNED = {"recursive doubling": 3, "ring": 4, "Rabenseifner": 6}
GLOO = ["ring", "ring_chunked", "halving_doubling", "bcube", "new_ring"]
# (name of the series, title in print, algorithm, options of `sumac perf`)
SUMAC = [
    ("sumac-shm-registered", "Sumac shm registered", "tree", ["--transport", "shm", "--memory", "registered"]),
    ("sumac-shm-plain", "Sumac shm plain", "tree", ["--transport", "shm", "--memory", "plain"]),
    ("sumac-udp", "Sumac udp", "tree", ["--transport", "udp"]),
    ("sumac-auto-registered", "Sumac auto registered", "auto", ["--transport", "shm", "--memory", "registered"]),
    ("sumac-auto-plain", "Sumac auto plain", "auto", ["--transport", "shm", "--memory", "plain"]),
    ("sumac-ring", "Sumac ring plain", "ring", ["--transport", "shm", "--memory", "plain"]),
    ("sumac-hd", "Sumac hd plain", "hd", ["--transport", "shm", "--memory", "plain"]),
    ("sumac-rd", "Sumac rd plain", "rd", ["--transport", "shm", "--memory", "plain"]),
]
# Open MPI's names of algorithms that Sumac has too.
SAME_ALGORITHM = {"ring": "ring", "hd": "Rabenseifner", "rd": "recursive doubling"}
LEVELS = [1, 2]
# Operations run back to back, like the others'. All elements are checked in one operation before and one after.
SUMAC_ITERATIONS_MIN, SUMAC_ITERATIONS_MAX = 12, 300
SUMAC_BYTES = 64 << 20

VERSION_LIMIT_S = 30


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of the plot: a library, represented at each size by its fastest variant."""

    name: str
    title: str
    # Further names that --only and --without accept.
    groups: tuple
    # The prerequisite that `run` provides.
    needs: str
    variants: tuple
    # (options, variant, ranks, sizes) -> commands, each of which prints one JSON object per size.
    commands: Callable
    # options -> name and version; None for programs without versions.
    version: Callable | None
    # Levels of Sumac's tree.
    levels: int | None = None
    # The variant of MPI libraries that is the same algorithm.
    same: str | None = None

    @property
    def is_sumac(self):
        return self.needs == "sumac"

    @property
    def is_mpi(self):
        return "mpi" in self.groups


@dataclasses.dataclass(frozen=True)
class Row:
    size_bytes: int
    time_us: float
    # CPU time per operation, maximum over ranks.
    cpu_us: float | None
    iterations: int | None
    # The transport that Sumac reports for the row.
    transport: str | None


def measure(series, variant, options, ranks, sizes):
    """Yield rows as the commands print them; a command that fails or times out yields its complete rows first."""
    deadline = time.monotonic() + options.limit
    for command in series.commands(options, variant, ranks, sizes):
        try:
            text = process.output(command, max(0, deadline - time.monotonic()))
        except process.Failed as failure:
            yield from rows(failure.text, sizes)
            raise
        yield from rows(text, sizes)


def rows(text, sizes):
    """Yield the rows among the lines that a command printed."""
    # A truncated line lacks the closing brace.
    for line in text.splitlines():
        if not line.startswith("{") or not line.endswith("}"):
            continue
        row = json.loads(line)
        absent = {"size_bytes", "time_us"} - row.keys()
        if absent:
            raise process.Failed(f"row without {', '.join(sorted(absent))}: {row}")
        if row["size_bytes"] not in sizes:
            raise process.Failed(f"unexpected row for {row['size_bytes']} bytes")
        # What was to run in the tree did, or perf has failed; `auto` takes any path.
        if row.get("wrong", 0) != 0 or row.get("algo", "tree") == "tree" and row.get("path", "tree") != "tree":
            raise process.Failed(f"path {row.get('path')}, {row.get('wrong')} wrong elements: {row}")
        transport = row.get("transport")
        yield Row(row["size_bytes"], row["time_us"], row.get("cpu_us"), row.get("iterations"), transport)


# ---- Sumac ----


def sumac(levels, algo, extra):
    """Build the commands for a tree of `levels` levels, one per size: `-b -e -f` only covers geometric series."""

    def commands(options, _variant, ranks, sizes):
        # Versions before --transport support only UDP.
        transport = extra if "--transport" in options.sumac_has else []
        for size in sizes:
            iterations = max(SUMAC_ITERATIONS_MIN, min(SUMAC_ITERATIONS_MAX, SUMAC_BYTES // size))
            command = [options.sumac, "perf", "-b", str(size), "-e", str(size), "-n", str(iterations)]
            command += ["--ranks", str(ranks), "--algo", algo, "--levels", str(levels), "--json"]
            check = ["--check", "ends"] if "--check" in options.sumac_has else []
            # A command without the option runs in place only.
            placement = "in-place" if options.in_place else "out-of-place"
            check += ["--buffers", placement] if "--buffers" in options.sumac_has else []
            yield command + transport + check

    return commands


def sumac_series():
    for name, title, algo, extra in SUMAC:
        # Schedules do not use the tree.
        for levels in LEVELS[:1] if algo in SAME_ALGORITHM else LEVELS:
            yield Series(
                name=f"{name}-{levels}",
                title=f"{title}, {levels} level{'s'[: levels - 1]}",
                groups=tuple(dict.fromkeys(("sumac", "-".join(name.split("-")[:2]), name))),
                same=SAME_ALGORITHM.get(algo),
                needs="sumac",
                variants=("",),
                commands=sumac(levels, algo, extra),
                version=lambda options: first_line([options.sumac, "--version"]),
                levels=levels,
            )


def sumac_options(command):
    """Return which of the options that select a series this `sumac perf` supports."""
    try:
        text = process.output([command, "perf", "--help"], VERSION_LIMIT_S)
    except process.Failed as failure:
        raise process.Failed(f"`{command} perf --help` failed: {failure}") from failure
    return {option for option in ("--transport", "--check", "--memory", "--buffers") if re.search(rf"^.*\s{option}\b", text, re.MULTILINE)}


def sumac_unsupported(series, has):
    """Return the options that a series needs and `sumac perf` does not support; UDP needs none."""
    for name, _, _, extra in SUMAC:
        if name in series.groups and name != "sumac-udp":
            return [option for option in extra if option.startswith("--") and option not in has]
    return []


# ---- MPI ----


def launcher(options, library, ranks):
    """Return the command that starts `ranks` ranks of an MPI library."""
    oversubscribed = ranks > os.cpu_count()
    venv = os.path.join(options.built, library, "bin")
    if library == "mpich4":
        return ["mpiexec.mpich", "-n", str(ranks)]
    if library == "mpich5":
        return [os.path.join(venv, "mpiexec"), "-n", str(ranks)]
    # Always set: Open MPI counts physical cores, of which a machine may have fewer than CPUs.
    command = ["mpirun.openmpi", "--oversubscribe"]
    if library == "openmpi5":
        command = [os.path.join(venv, "mpirun"), "--map-by", ":OVERSUBSCRIBE"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if oversubscribed:
        # Ranks that share a core must yield it while they wait.
        command += ["--mca", "mpi_yield_when_idle", "1"]
    return command + ["-np", str(ranks)]


def mpi_program(options, library):
    return os.path.join(options.built, f"mpi_allreduce.{library}")


def mpi(library):
    def commands(options, variant, ranks, sizes):
        command = launcher(options, library, ranks)
        if variant in OPENMPI_TUNED:
            command += ["--mca", "coll_tuned_use_dynamic_rules", "1"]
            command += ["--mca", "coll_tuned_allreduce_algorithm", str(OPENMPI_TUNED[variant])]
        command.append(mpi_program(options, library))
        if options.in_place:
            command.append("--in-place")
        yield command + [str(size) for size in sizes]

    return commands


def mpi_version(library):
    return lambda options: first_line([*launcher(options, library, 1), mpi_program(options, library), "--version"])


def mpi_series():
    for library, title, tuned in (
        ("openmpi4", "Open MPI 4", OPENMPI_TUNED),
        ("openmpi5", "Open MPI 5", OPENMPI_TUNED),
        ("mpich4", "MPICH 4", ()),
        ("mpich5", "MPICH 5", ()),
    ):
        yield Series(library, title, ("mpi",), library, ("default", *tuned), mpi(library), mpi_version(library))


# ---- the others ----


def gloo(options, variant, ranks, sizes):
    yield [os.path.join(options.built, "gloo_allreduce"), variant, str(ranks), *map(str, sizes)]


def gloo_version(_options):
    return "Gloo " + first_line(["dpkg-query", "--showformat=${Version}", "--show", "libgloo-dev"])


def torch_program(options):
    return [options.torch_python, os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_allreduce.py")]


def torch(options, _variant, ranks, sizes):
    yield [*torch_program(options), str(ranks), *map(str, sizes)]


def torch_version(options):
    return first_line([*torch_program(options), "--version"])


def bare(options, _variant, ranks, sizes):
    yield [os.path.join(options.built, "bare_loop"), str(ranks), *map(str, sizes)]


def first_line(command):
    """Return the first line of a command's output up to the first comma, without a leading "Version:"."""
    line = (process.output(command, VERSION_LIMIT_S).splitlines() or [""])[0]
    return " ".join(line.split(",")[0].replace("Version:", "").split())


ALL = [
    *sumac_series(),
    *mpi_series(),
    Series("gloo", "Gloo", (), "gloo", tuple(GLOO), gloo, gloo_version),
    Series("torch", "PyTorch gloo", (), "torch", ("",), torch, torch_version),
    Series("bare", "bare loop", (), "bare", ("",), bare, None),
]


def names():
    """Return all names that --only and --without accept, in the order of the series."""
    return list(dict.fromkeys(name for series in ALL for name in (*series.groups, series.name)))


def chosen(only, without, levels):
    """Return the series that `only` names, or all of them, except those that `without` names."""

    def is_named(series, accepted):
        return any(name in accepted for name in (series.name, *series.groups))

    named = [series for series in ALL if (not only or is_named(series, only)) and not is_named(series, without)]
    return [series for series in named if series.levels is None or series.levels in levels]

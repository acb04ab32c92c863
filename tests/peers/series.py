"""What is compared: which series there are, which variants each has, and the commands that measure them."""

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable

import process

# A tuned algorithm of Open MPI by the number that its parameter takes.
OPENMPI_TUNED = {"recursive doubling": 3, "ring": 4, "Rabenseifner": 6}
GLOO = ["ring", "ring_chunked", "halving_doubling", "bcube", "new_ring"]
# (name of the series, what it is called in print, options of `sumac perf`)
SUMAC = [
    ("sumac-shm-registered", "Sumac shm registered", ["--transport", "shm", "--memory", "registered"]),
    ("sumac-shm-plain", "Sumac shm plain", ["--transport", "shm", "--memory", "plain"]),
    ("sumac-udp", "Sumac udp", ["--transport", "udp"]),
]
LEVELS = [1, 2]
# Back to back, as the others are measured; every element of an operation before and one after is checked.
SUMAC_ITERATIONS_MIN, SUMAC_ITERATIONS_MAX = 12, 300
SUMAC_BYTES = 64 << 20

VERSION_LIMIT_S = 30


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of the plot: a library, of which the fastest variant counts at each size."""

    name: str
    title: str
    # What --only and --without may call it, besides its name.
    groups: tuple
    # What `run` has to provide for it.
    needs: str
    variants: tuple
    # (options, variant, ranks, sizes) -> commands, each of which prints one JSON object a size.
    commands: Callable
    # options -> which one was measured; None of what has no versions
    version: Callable | None
    # Of Sumac's tree.
    levels: int | None = None

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
    # Processor time of an operation at the rank that used most, or None.
    cpu_us: float | None
    iterations: int | None
    # How Sumac's ranks were attached, as it says itself.
    transport: str | None


def measure(series, variant, options, ranks, sizes):
    """Yield rows as the commands print them; what fails or is cut off yields what it has first."""
    deadline = time.monotonic() + options.limit
    for command in series.commands(options, variant, ranks, sizes):
        try:
            text = process.output(command, max(0, deadline - time.monotonic()))
        except process.Failed as failure:
            yield from rows(failure.text, sizes)
            raise
        yield from rows(text, sizes)


def rows(text, sizes):
    """Return the rows among the lines that a command printed."""
    # A line that was cut short has no end.
    for line in text.splitlines():
        if not line.startswith("{") or not line.endswith("}"):
            continue
        row = json.loads(line)
        lacking = {"size_bytes", "time_us"} - row.keys()
        if lacking:
            raise process.Failed(f"a row lacks {', '.join(sorted(lacking))}: {row}")
        if row["size_bytes"] not in sizes:
            raise process.Failed(f"a result at {row['size_bytes']} bytes, which was not asked for")
        if row.get("wrong", 0) != 0 or row.get("path", "tree") != "tree":
            raise process.Failed(f"path {row.get('path')}, {row.get('wrong')} wrong elements: {row}")
        transport = row.get("transport")
        yield Row(row["size_bytes"], row["time_us"], row.get("cpu_us"), row.get("iterations"), transport)


# ---- Sumac ----


def sumac(levels, extra):
    """Return what gives the commands of a tree of so many levels: one a size, since sizes are no geometric series."""

    def commands(options, _variant, ranks, sizes):
        # A command from before --transport has UDP alone, and no option for it.
        transport = extra if "--transport" in options.sumac_has else []
        for size in sizes:
            iterations = max(SUMAC_ITERATIONS_MIN, min(SUMAC_ITERATIONS_MAX, SUMAC_BYTES // size))
            command = [options.sumac, "perf", "-b", str(size), "-e", str(size), "-n", str(iterations)]
            command += ["--ranks", str(ranks), "--algo", "tree", "--levels", str(levels), "--json"]
            check = ["--check", "ends"] if "--check" in options.sumac_has else []
            # In place, as the figures in host/docs/tuning.md; a command without the option has nothing else.
            check += ["--buffers", "in-place"] if "--buffers" in options.sumac_has else []
            yield command + transport + check

    return commands


def sumac_series():
    for name, title, extra in SUMAC:
        for levels in LEVELS:
            yield Series(
                name=f"{name}-{levels}",
                title=f"{title}, {levels} level{'s'[: levels - 1]}",
                groups=tuple(dict.fromkeys(("sumac", "-".join(name.split("-")[:2]), name))),
                needs="sumac",
                variants=("",),
                commands=sumac(levels, extra),
                version=lambda options: first_line([options.sumac, "--version"]),
                levels=levels,
            )


def sumac_options(command):
    """Return which of the options that choose a series this `sumac perf` has."""
    try:
        text = process.output([command, "perf", "--help"], VERSION_LIMIT_S)
    except process.Failed as failure:
        raise process.Failed(f"`{command} perf --help` failed: {failure}") from failure
    return {option for option in ("--transport", "--check", "--memory", "--buffers") if re.search(rf"^.*\s{option}\b", text, re.MULTILINE)}


def sumac_lacks(series, has):
    """Return which options a series needs that `sumac perf` has not; UDP needs none."""
    for name, _, extra in SUMAC:
        if name in series.groups and name != "sumac-udp":
            return [option for option in extra if option.startswith("--") and option not in has]
    return []


# ---- MPI ----


def launcher(options, library, ranks):
    """Return the command that starts so many ranks of one of the MPI libraries."""
    crowded = ranks > os.cpu_count()
    venv = os.path.join(options.built, library, "bin")
    if library == "mpich4":
        return ["mpiexec.mpich", "-n", str(ranks)]
    if library == "mpich5":
        return [os.path.join(venv, "mpiexec"), "-n", str(ranks)]
    # Asked for always: Open MPI counts physical cores, and of those a machine may have fewer than CPUs.
    command = ["mpirun.openmpi", "--oversubscribe"]
    if library == "openmpi5":
        command = [os.path.join(venv, "mpirun"), "--map-by", ":OVERSUBSCRIBE"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if crowded:
        # Ranks that take turns on a core must give it up while they wait.
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
    """Return the first line that a command prints, up to the first comma, less the word for what it says."""
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
    """Return all that --only and --without may name, in the order of the series."""
    return list(dict.fromkeys(name for series in ALL for name in (*series.groups, series.name)))


def chosen(only, without, levels):
    """Return the series that are named, or all, less those that are not wanted."""

    def is_named(series, wanted):
        return any(name in wanted for name in (series.name, *series.groups))

    named = [series for series in ALL if (not only or is_named(series, only)) and not is_named(series, without)]
    return [series for series in named if series.levels is None or series.levels in levels]

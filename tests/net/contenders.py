"""What `compare` measures: Sumac's tree and ring, and Gloo and Open MPI as peers, each as ranks on the hosts of a
network.

A measurement is the median over some operations of the slowest rank's time. The first operation, whose result is
checked, is left out, and a barrier that does not count is before each other one.
"""

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

from namespaces import on

PEERS = pathlib.Path(__file__).resolve().parents[1] / "peers"
sys.path.insert(0, str(PEERS))
import process  # noqa: E402

# The limit of one measurement.
LIMIT_S = 120
LARGE = 64 << 10
ITERATIONS_SMALL = 200
# Names of series, in the order of the table.
OWN = ["tree", "ring"]
OTHERS = ["gloo", "openmpi"]
# The algorithms of a peer, of which the fastest counts.
VARIANTS = {"gloo": ["new_ring", "halving_doubling"], "openmpi": ["default", "ring"]}
VARIANTS_SMALL = {"gloo": ["halving_doubling", "new_ring"], "openmpi": ["default"]}
OPENMPI_RING = ["coll_tuned_use_dynamic_rules", "1", "coll_tuned_allreduce_algorithm", "4"]
# Turns the address by which `mpirun` knows a host into a namespace.
AGENT = """#!/bin/sh
case $1 in
{cases}
*) echo "no host has the address $1" >&2; exit 1 ;;
esac
shift
exec ip netns exec "$host" unshare --mount sh -c "{prepare}$*"
"""


def build(folder):
    """Build the peers' drivers. Returns the series that can be measured, and why the others cannot."""
    os.makedirs(folder, exist_ok=True)
    gloo = ["g++", "-O2", "-std=c++17", "-o", f"{folder}/gloo_allreduce", f"{PEERS}/gloo_allreduce.cc"]
    openmpi = ["mpicc.openmpi", "-O2", "-std=gnu11", "-o", f"{folder}/mpi_allreduce", f"{PEERS}/mpi_allreduce.c"]
    missing = {
        "gloo": absent([("g++", "g++")], ["/usr/include/gloo/allreduce.h", "libgloo-dev"]),
        "openmpi": absent([("mpirun.openmpi", "openmpi-bin"), ("mpicc.openmpi", "libopenmpi-dev")]),
    }
    commands = {"gloo": [*gloo, "-lgloo", "-lpthread"], "openmpi": openmpi}
    for name, command in commands.items():
        if not missing[name]:
            done = subprocess.run(command, capture_output=True, text=True)
            missing[name] = "" if done.returncode == 0 else f"its driver does not build: {done.stderr[-500:]}"
    skipped = {name: why for name, why in missing.items() if why}
    return [name for name in OWN + OTHERS if name not in skipped], skipped


def absent(programs, header=None):
    packages = [package for program, package in programs if not shutil.which(program)]
    if header and not os.path.exists(header[0]):
        packages.append(header[1])
    return f"needs these of Debian's packages: {' '.join(packages)}" if packages else ""


def variants(series, size):
    """Return the variants of a series that are measured at a size."""
    known = VARIANTS if size >= LARGE else VARIANTS_SMALL
    return known.get(series, [""])


def measure(series, variant, setting, size, iterations):
    """Measure a series once. Returns the time in microseconds.

    # Errors
    `process.Failed`: it failed, was too late, or a result was wrong.
    """
    iterations = iterations if size >= LARGE else ITERATIONS_SMALL
    if series in OWN:
        return sumac(series, setting, size, iterations)
    rows = process.output({"gloo": gloo, "openmpi": openmpi}[series](variant, setting, size, iterations), LIMIT_S)
    return json.loads(rows.splitlines()[-1])["time_us"]


def sumac(algorithm, setting, size, iterations):
    count = ["-w", "1", "-n", str(iterations), "-c", "ends", "--buffers", "in-place"]
    job = setting.parts.start_job(setting.hosts, ["-b", str(size), "-e", str(size), "--algo", algorithm, *count])
    try:
        rows = job.finish()
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        job.end()
        raise process.Failed(f"{failure}") from failure
    paths = {row["path"] for row in rows}
    if paths != {algorithm}:
        raise process.Failed(f"took the path {', '.join(sorted(paths))}")
    return statistics.median(row["time_us"] for row in rows)


def gloo(algorithm, setting, size, iterations):
    hosts = ",".join(f"{host}={setting.network.addresses[host]}" for host in setting.hosts)
    command = [f"{setting.built}/gloo_allreduce", "--iterations", str(iterations), "--hosts", hosts]
    return [*command, algorithm, str(len(setting.hosts)), str(size)]


def openmpi(algorithm, setting, size, iterations):
    agent = write_agent(setting.folder, setting.network.addresses)
    slots = ",".join(f"{setting.network.addresses[host]}:1" for host in setting.hosts)
    subnet = setting.network.family.near
    settings = ["plm_rsh_agent", agent, "plm_rsh_no_tree_spawn", "1", "oob_tcp_if_include", subnet]
    settings += ["pml", "ob1", "btl", "tcp,self", "btl_tcp_if_include", subnet, "mpi_yield_when_idle", "1"]
    settings += OPENMPI_RING if algorithm == "ring" else []
    pairs = [word for name, value in zip(settings[::2], settings[1::2]) for word in ("--mca", name, value)]
    command = ["mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", *pairs, "--host", slots]
    driver = [f"{setting.built}/mpi_allreduce", "--in-place", "--iterations", str(iterations), str(size)]
    return on("controller", [*command, "-np", str(len(setting.hosts)), *driver])


def write_agent(folder, addresses, prepare=""):
    """Write what `mpirun` starts its daemons with, in place of ssh. `prepare` runs first, in a mount namespace."""
    path = os.path.join(folder, "agent")
    with open(path, "w", encoding="utf-8") as file:
        cases = "\n".join(f"{found}) host={name} ;;" for name, found in addresses.items())
        file.write(AGENT.format(cases=cases, prepare=prepare))
    os.chmod(path, 0o700)
    return path

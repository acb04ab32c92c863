"""What a machine is, which RDMA port is measured, and its hardware counters."""

import ipaddress
import json
import re

from remote import Unreachable

# As `sumac doctor` describes a port.
PORT = re.compile(r"^(?P<device>[^:\s]+):(?P<port>\d+), (?P<kind>\w+), packets of (?P<mtu>\d+) bytes, \[(?P<gid>[^]]+)\], index (?P<index>\d+)$")
PROGRAMS = ("sumac", "verbs", "ib_write_bw", "ib_read_bw", "ib_send_lat", "rdma", "ip")
PACKAGES = "Debian: apt-get install perftest iproute2"

COUNTERS = """\
cd /sys/class/infiniband/{device}/ports/{port} || exit 1
for file in counters/* hw_counters/*; do [ -r "$file" ] && echo "${{file##*/}} $(cat "$file" 2>/dev/null)"; done
true
"""
FACTS = """\
device=/sys/class/infiniband/{device}
say() {{ echo "$1=$(cat "$2" 2>/dev/null | head -n 1)"; }}
echo "system=$(uname -sr)"
say board $device/board_id
say type $device/hca_type
say firmware $device/fw_ver
say rate $device/ports/{port}/rate
say interface $device/ports/{port}/gid_attrs/ndevs/{index}
echo "pci=$(basename "$(readlink -f $device/device 2>/dev/null)")"
echo "locked=$(ulimit -l)"
[ ! -e $device/parent ] || echo soft=yes
"""


class Link:
    """The RDMA port of a machine that is measured."""

    def __init__(self, device, port, index, address, mtu):
        self.device, self.port, self.index, self.address, self.mtu = device, port, index, address, mtu

    def verbs(self):
        """Return its name for Sumac. perftest allows relaxed ordering unless told otherwise, so Sumac does, too."""
        return f"{self.device}:{self.port}:{self.index}/relaxed"

    def perftest(self):
        return ["-d", self.device, "-i", self.port, "-x", self.index]


def inspect(host, wanted, address):
    """Find the machine's programs and port; set `host.link` and return its facts. `wanted` is DEVICE[:PORT], or empty."""
    if host.run("true", check=False).returncode != 0:
        raise Unreachable(f"{host.label}: cannot reach {host.destination} by ssh without a password")
    absent = [name for name in PROGRAMS if host.run(f"command -v {name}", check=False).returncode != 0]
    if absent:
        raise Unreachable(f"{host.label}: {host.destination} lacks {', '.join(absent)}; {PACKAGES}; --programs copies sumac and verbs")
    host.link = choose(host, ports(host), wanted, address)
    lines = host.output(FACTS.format(device=host.link.device, port=host.link.port, index=host.link.index)).splitlines()
    facts = dict(ssh=host.destination, link=host.link.verbs(), address=host.link.address, mtu=host.link.mtu)
    facts |= dict(line.split("=", 1) for line in lines)
    host.is_soft = "soft" in facts
    host.interface, host.pci = facts["interface"], facts["pci"]
    return facts


def ports(host):
    """Return the ports that `sumac doctor` can use."""
    report = json.loads(host.output("sumac doctor --json || true"))
    found = [row for row in report["findings"] if row["what"] == "RDMA (verbs)"]
    matches = [PORT.match(row["found"]) for row in found]
    if not any(matches):
        reasons = "; ".join(row["found"] for row in found)
        raise Unreachable(f"{host.label}: {host.destination} has no RDMA port that can be used: {reasons}")
    return [match for match in matches if match]


def choose(host, found, wanted, address):
    def is_wanted(match):
        return wanted in ("", match["device"], f"{match['device']}:{match['port']}")

    def mapped(match):
        return getattr(ipaddress.ip_address(match["gid"]), "ipv4_mapped", None)

    matching = [match for match in found if is_wanted(match)]
    # Without a choice by the caller, the one with an IPv4 address.
    if not wanted and len(matching) > 1:
        matching = [match for match in matching if mapped(match)] or matching
    names = ", ".join(f"{match['device']}:{match['port']}" for match in found)
    if len(matching) != 1:
        raise Unreachable(f"{host.label}: give one of its ports, as in {host.destination},{found[0]['device']}; there are: {names}")
    match = matching[0]
    address = address or (str(mapped(match)) if mapped(match) else "")
    if not address:
        raise Unreachable(f"{host.label}: its port has no IPv4 address; give {host.destination},{match['device']},ADDRESS")
    return Link(match["device"], int(match["port"]), int(match["index"]), address, int(match["mtu"]))


def counters(host):
    """Return the hardware counters of the port."""
    lines = host.output(COUNTERS.format(device=host.link.device, port=host.link.port)).splitlines()
    pairs = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def changes(before, after):
    return {name: after[name] - before[name] for name in sorted(after) if after[name] != before.get(name, after[name])}


def resources(host):
    """Return how many objects of each kind the device has, as in {"qp": 3, "pd": 2}."""
    text = host.output(["rdma", "resource", "show", host.link.device])
    return {name: int(count) for name, count in re.findall(r"\b(pd|cq|qp|mr|srq|ctx) (\d+)", text)}

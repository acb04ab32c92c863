"""A network on one machine: switches are bridges, hosts are network namespaces, and links between them are pairs of
virtual interfaces that may be shaped.

Everything is in one namespace that `enter` makes, and ends with it.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time

SKIP = 77
# The host between the two subnets.
ROUTER = "router"
# The limit of every wait; a passing run never reaches it.
LIMIT = 60
# The header of the packets with chunks, and what the length of chunks is a multiple of.
PACKET_HEADER, PACKET_STEP = 48, 16
# The longest headers of IP and TCP that segments have here.
SEGMENT_HEADERS = 60
# Larger than any window of the tests, so that a shaped port delays packets and drops none.
QUEUE_BYTES = 4 << 20
BURST_BYTES = 32 << 10
# All ends with the process that starts it, even if that is killed.
ENTER = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]


@dataclasses.dataclass(frozen=True)
class Family:
    """A version of IP. Hosts have addresses in the near subnet; those behind a router in the far one."""

    version: int
    near_host: str
    far_host: str
    near: str
    far: str
    # IP's and UDP's, in bytes.
    headers: int
    forwarding: str
    # The protocol of messages about packets.
    messages: str

    def with_len(self, address):
        """Return an address with the length of its subnet's prefix."""
        return f"{address}/{self.near.split('/')[1]}"

    def packet_len(self, mtu, step=PACKET_STEP):
        """Return the length of a tree's longest packet over links with this MTU, if chunks are multiples of `step`."""
        return (mtu - self.headers - PACKET_HEADER) // step * step + PACKET_HEADER


IPV4 = Family(4, "10.0.0.{}", "10.0.1.{}", "10.0.0.0/24", "10.0.1.0/24", 28, "net/ipv4/ip_forward", "icmp")
IPV6 = Family(
    6, "fd00::{}", "fd00:1::{}", "fd00::/64", "fd00:1::/64", 48, "net/ipv6/conf/all/forwarding", "ipv6-icmp"
)


def unavailable():
    """Return why namespaces cannot be made here, or None."""
    for need in ("setpriv", "unshare", "ip"):
        if not shutil.which(need):
            return f"no {need}"
    if subprocess.run([*ENTER, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        return "namespaces cannot be made here (CAP_SYS_ADMIN)"
    return None


def enter(script, *arguments, **options):
    """Run this script again in namespaces of its own."""
    return subprocess.run([*ENTER, sys.executable, os.path.abspath(script), *map(str, arguments)], **options)


def prepare():
    """Prepare the namespaces that `enter` has made."""
    # `ip netns` keeps names of namespaces there.
    os.makedirs("/run/netns", exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run/netns"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True)


def on(host, command):
    """Return the command that runs a command on a host."""
    return ["ip", "netns", "exec", host, *command]


def set_system(host, name, value):
    """Set a system's parameter on a host."""
    subprocess.run(on(host, ["sh", "-c", f"echo {value} > /proc/sys/{name}"]), check=True)


def with_port(address, port):
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def wait_for(what, condition, limit=LIMIT):
    until = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} did not happen within {limit} s"
        time.sleep(0.05)
    return found


def tree_devices(leaves, spine):
    """Return the devices of a tree of two levels, with options that let none but the spine be its root."""
    return {leaf: ["--children", str(len(below))] for leaf, below in leaves.items()} | {spine: []}


def write_fabric(path, leaves, spine):
    """Describe a network of two levels to the controller: the hosts below each leaf device. Returns the path."""
    lines = [f'[[switch]]\nname = "{name}"\naggregation = true\n' for name in [*leaves, spine]]
    for leaf, below in leaves.items():
        lines += [f'[[host]]\nname = "{host}"\n[[link]]\nends = ["{host}", "{leaf}"]\n' for host in below]
        lines.append(f'[[link]]\nends = ["{leaf}", "{spine}"]\n')
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return path


def write_ports(path, hosts, devices, rate_mbit=1000):
    """Describe hosts and devices behind equal ports of one switch, which is no device. Returns the path."""
    lines = ['[[switch]]\nname = "switch"\n']
    lines += [f'[[switch]]\nname = "{device}"\naggregation = true\n' for device in devices]
    lines += [f'[[host]]\nname = "{host}"\n' for host in hosts]
    lines += [f'[[link]]\nends = ["{end}", "switch"]\nrate_gbits = {rate_mbit / 1000}\n' for end in [*hosts, *devices]]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return path


class Network:
    """Switches and hosts. The interface of a host is `eth0`; the other end of its link has the host's name.

    `rate_mbit` limits each link in each direction; None is no limit.
    """

    def __init__(self, mtu=1500, rate_mbit=None, family=IPV4):
        self.mtu, self.rate_mbit, self.family = mtu, rate_mbit, family
        self.addresses = {}
        # The router tells nobody what it drops.
        self.is_silent = False
        # Of each host: the subnets, and how it reaches them.
        self.routes = {}

    def ip(self, host, *words):
        """Run `ip` on a host, for the network's version of IP."""
        ip("-n", host, f"-{self.family.version}", *words)

    def add_address(self, host, interface, address):
        # Nobody else has it, so it need not be tried first.
        nodad = ["nodad"] if self.family is IPV6 else []
        self.ip(host, "addr", "add", self.family.with_len(address), "dev", interface, *nodad)

    def change_route(self, host, route, *values):
        """Change values of a route of a host."""
        # That of a route to an own subnet.
        metric = ["metric", 256] if self.family is IPV6 and "dev" in route else []
        self.ip(host, "route", "change", *route, *metric, *values)

    def add_switch(self, name):
        ip("link", "add", name, "mtu", self.mtu, "type", "bridge")
        ip("link", "set", name, "up")

    def add_trunk(self, upper, lower):
        """Connect two switches by a link of its own."""
        ends = f"{lower}-up", f"{lower}-down"
        ip("link", "add", ends[0], "mtu", self.mtu, "type", "veth", "peer", "name", ends[1], "mtu", self.mtu)
        for end, switch in zip(ends, (lower, upper)):
            ip("link", "set", end, "master", switch, "up")
            self.shape(["tc"], end)

    def add_host(self, name, number, switch="switch", is_shaped=True, mtu=None):
        mtu = mtu or self.mtu
        self.addresses[name] = self.family.near_host.format(number)
        ip("netns", "add", name)
        ip("link", "add", name, "mtu", mtu, "type", "veth", "peer", "name", "eth0", "netns", name, "mtu", mtu)
        ip("link", "set", name, "master", switch, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "eth0", "up")
        self.add_address(name, "eth0", self.addresses[name])
        self.routes[name] = [(self.family.near, "dev", "eth0")]
        if is_shaped:
            self.shape(["tc"], name)
            self.shape(["tc", "-n", name], "eth0")

    def shape(self, tc, interface):
        if self.rate_mbit:
            limits = ["rate", f"{self.rate_mbit}mbit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
            subprocess.run([*tc, "qdisc", "add", "dev", interface, "root", "tbf", *limits], check=True)

    def sent_bytes(self, name):
        """Return how many bytes a host has sent on its link."""
        shown = subprocess.run(["ip", "-j", "-s", "link", "show", name], check=True, capture_output=True, text=True)
        return json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"]

    def add_routed_host(self, name):
        """Add a host in the other subnet, behind a router, for all hosts that there are."""
        near, far = self.family.near_host.format(254), self.family.far_host.format(254)
        hosts = list(self.addresses)
        self.add_host(ROUTER, 254)
        self.addresses.pop(ROUTER)
        self.addresses[name] = self.family.far_host.format(2)
        ip("netns", "add", name)
        ends = ["eth1", "netns", ROUTER, "mtu", self.mtu], ["eth0", "netns", name, "mtu", self.mtu]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host, end, own in ((ROUTER, "eth1", far), (name, "eth0", self.addresses[name])):
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", end, "up")
            self.add_address(host, end, own)
        set_system(ROUTER, self.family.forwarding, 1)
        self.routes[name] = [(self.family.near, "via", far)]
        for host in hosts:
            self.routes[host].append((self.family.far, "via", near))
        for host in [name, *hosts]:
            self.ip(host, "route", "add", *self.routes[host][-1])

    def narrow_router(self, mtu):
        """Have the router drop packets longer than this, in both directions, and tell their senders."""
        for subnet, interface in ((self.family.near, "eth0"), (self.family.far, "eth1")):
            self.change_route(ROUTER, (subnet, "dev", interface), "mtu", "lock", mtu)

    def silence_router(self):
        """Have the router tell nobody what it drops. Neighbours are still discovered: messages about them need no
        route."""
        self.is_silent = True
        self.ip(ROUTER, "rule", "add", "iif", "lo", "ipproto", self.family.messages, "blackhole")

    def path_mtu(self, host, to):
        """Return the MTU that a host has been told of for the path to another one; None if nobody told it."""
        shown = subprocess.run(["ip", "-j", "-n", host, "route", "get", to], check=True, capture_output=True, text=True)
        return next((metric["mtu"] for metric in json.loads(shown.stdout)[0].get("metrics", []) if "mtu" in metric), None)

    def narrow(self, *ends, mtu):
        """Have ends of links drop packets longer than this, in both directions, and tell nobody. The interfaces of hosts
        keep their MTUs. TCP's segments are limited, as routers do in front of narrow paths."""
        for end in ends:
            ip("link", "set", end, "mtu", mtu)
        self.limit_segments(mtu)

    def limit_segments(self, mtu):
        """Have TCP send no packets longer than this, and hosts cut trains of packets, which virtual links would carry
        whole, however narrow they are."""
        segment = min(mtu, self.mtu) - SEGMENT_HEADERS
        for host in self.addresses:
            ip("-n", host, "link", "set", "eth0", "gso_max_segs", 1)
            for route in self.routes[host]:
                self.change_route(host, route, "advmss", segment)

    def move_host(self, name, number):
        """Give a host another address instead of the one that it has."""
        before, self.addresses[name] = self.addresses[name], self.family.near_host.format(number)
        self.add_address(name, "eth0", self.addresses[name])
        self.ip(name, "addr", "del", self.family.with_len(before), "dev", "eth0")

"""A network on one machine: switches are bridges, hosts are network namespaces, and links between them are pairs of
virtual interfaces that may be shaped.

Everything is in one namespace that `enter` makes, and ends with it.
"""

import json
import os
import shutil
import subprocess
import sys
import time

SKIP = 77
# The limit of every wait; a passing run never reaches it.
LIMIT = 60
SUBNET = "10.0.0"
FAR_SUBNET = "10.0.1"
# IP's, TCP's and its options.
SEGMENT_HEADERS = 60
# Larger than any window of the tests, so that a shaped port delays packets and drops none.
QUEUE_BYTES = 4 << 20
BURST_BYTES = 32 << 10
# All ends with the process that starts it, even if that is killed.
ENTER = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]


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


def address(number):
    return f"{SUBNET}.{number}"


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


class Network:
    """Switches and hosts. The interface of a host is `eth0`; the other end of its link has the host's name.

    `rate_mbit` limits each link in each direction; None is no limit.
    """

    def __init__(self, mtu=1500, rate_mbit=None):
        self.mtu, self.rate_mbit = mtu, rate_mbit
        self.addresses = {}

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
        self.addresses[name] = address(number)
        ip("netns", "add", name)
        ip("link", "add", name, "mtu", mtu, "type", "veth", "peer", "name", "eth0", "netns", name, "mtu", mtu)
        ip("link", "set", name, "master", switch, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
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

    def add_routed_host(self, name, mtu):
        """Add a host in another subnet, behind a router that tells who sends packets longer than `mtu`."""
        router, near, far = "router", address(254), f"{FAR_SUBNET}.254"
        hosts = list(self.addresses)
        self.add_host(router, 254)
        self.addresses.pop(router)
        self.addresses[name] = f"{FAR_SUBNET}.2"
        ip("netns", "add", name)
        ends = ["eth1", "netns", router, "mtu", self.mtu], ["eth0", "netns", name, "mtu", self.mtu]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host, end, own in ((router, "eth1", far), (name, "eth0", self.addresses[name])):
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", end, "up")
            ip("-n", host, "addr", "add", f"{own}/24", "dev", end)
        subprocess.run(on(router, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]), check=True)
        for subnet, interface in ((SUBNET, "eth0"), (FAR_SUBNET, "eth1")):
            ip("-n", router, "route", "change", f"{subnet}.0/24", "dev", interface, "mtu", "lock", mtu)
        ip("-n", name, "route", "add", f"{SUBNET}.0/24", "via", far)
        for host in hosts:
            ip("-n", host, "route", "add", f"{FAR_SUBNET}.0/24", "via", near)

    def narrow(self, *ends, mtu):
        """Have ends of links drop packets longer than this, in both directions, and tell nobody. The interfaces of hosts
        keep their MTUs. TCP's segments are limited, as routers do in front of narrow paths."""
        for end in ends:
            ip("link", "set", end, "mtu", mtu)
        self.limit_segments(mtu)

    def limit_segments(self, mtu):
        """Have TCP send no packets longer than this, and hosts cut trains of packets, which virtual links would carry
        whole, however narrow they are."""
        for host in self.addresses:
            ip("-n", host, "link", "set", "eth0", "gso_max_segs", 1)
            segment = min(mtu, self.mtu) - SEGMENT_HEADERS
            ip("-n", host, "route", "change", f"{SUBNET}.0/24", "dev", "eth0", "advmss", segment)

    def move_host(self, name, number):
        """Give a host another address instead of the one that it has."""
        ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
        ip("-n", name, "addr", "del", f"{self.addresses[name]}/24", "dev", "eth0")
        self.addresses[name] = address(number)

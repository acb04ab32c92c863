"""The networks of the tests, and what runs on them: each of these takes a network without hosts, and builds one."""

import os

import namespaces
import walkthrough
from parts import Parts, behind_relay

RANKS = ["rank0", "rank1", "rank2"]
# In two levels: the ranks below each leaf device.
LEAVES = {"leaf0": ["rank0", "rank1"], "leaf1": ["rank2", "rank3"]}
LEASE_S = 2
# The MTU of a link between hosts whose interfaces have larger ones, and the least that IPv6 allows.
NARROW, LEAST = 1300, 1280


def add_hosts(network, others, mtus=None):
    """Connect hosts and those of the ranks to one switch."""
    network.add_switch("switch")
    for host, number in [*others.items(), *zip(RANKS, range(10, 20))]:
        network.add_host(host, number, mtu=(mtus or {}).get(host))


def one_switch(folder, sumac, network, mtus=None):
    """Three ranks and two devices, of which one is spare."""
    add_hosts(network, {"controller": 1, "leaf": 2, "spare": 3}, mtus)
    return Parts(sumac, folder, network, {"leaf": [], "spare": []}, ["--lease", str(LEASE_S)])


def mixed_mtus(folder, sumac, network):
    """One of the links carries packets of 1500 bytes only."""
    return one_switch(folder, sumac, network, {"rank0": 1500})


def one_relay(folder, sumac, network):
    """One device, behind a relay on its host."""
    add_hosts(network, {"controller": 1, "leaf": 2})
    return Parts(sumac, folder, network, {"leaf": behind_relay(network, "leaf")})


def two_levels(folder, sumac, network):
    """Two leaf devices with two ranks each, below a spine device."""
    network.add_switch("upper")
    network.add_host("controller", 1, "upper")
    network.add_host("spine", 2, "upper")
    for leaf, ranks in LEAVES.items():
        switch = f"switch{leaf[-1]}"
        network.add_switch(switch)
        network.add_trunk("upper", switch)
        network.add_host(leaf, 3 + int(leaf[-1]), switch)
        for rank in ranks:
            network.add_host(rank, 10 + int(rank[-1]), switch)
    fabric = namespaces.write_fabric(os.path.join(folder, "fabric.toml"), LEAVES, "spine")
    options = ["--lease", str(LEASE_S), "--topology", fabric]
    devices = namespaces.tree_devices(LEAVES, "spine")
    return Parts(sumac, folder, network, devices, options, {"SUMAC_HOST": "{host}"})


def black_hole(folder, sumac, network, mtu=NARROW):
    """The link of one rank silently drops packets that its interface sends."""
    parts = one_switch(folder, sumac, network)
    network.narrow("rank1", mtu=mtu)
    return parts


def least_mtu(folder, sumac, network):
    """As `black_hole`, as narrow as IPv6 allows."""
    return black_hole(folder, sumac, network, LEAST)


def limited(build):
    """As what `build` makes; TCP's segments fit a link that is narrow later."""

    def limited_segments(folder, sumac, network):
        parts = build(folder, sumac, network)
        network.limit_segments(NARROW)
        return parts

    return limited_segments


def narrow_trunk(folder, sumac, network):
    """The link between a leaf device's switch and the upper one does so."""
    parts = two_levels(folder, sumac, network)
    network.narrow("switch0-up", "switch0-down", mtu=NARROW)
    return parts


def router(folder, sumac, network, prepare=lambda: None):
    """One device, behind a router, which tells who sends packets longer than its MTU."""
    add_hosts(network, {"controller": 1})
    network.add_routed_host("leaf")
    prepare()
    return Parts(sumac, folder, network, {"leaf": []}, ["--lease", str(LEASE_S)])


def silent_router(folder, sumac, network):
    """As `router`, but it tells nobody. TCP's segments fit a path that is narrow later."""

    def prepare():
        network.silence_router()
        network.limit_segments(NARROW)

    return router(folder, sumac, network, prepare)


def narrow(build):
    """As what `build` makes, with a router whose MTU is small from the start."""

    def narrow_router(folder, sumac, network):
        parts = build(folder, sumac, network)
        network.narrow_router(NARROW)
        return parts

    narrow_router.__name__ = f"narrow_{build.__name__}"
    return narrow_router


def in_the_switch(folder, sumac, network):
    """Eight ranks and a device, without a word about the network. The device's port has no limit."""
    network.add_switch("switch")
    network.add_host("controller", 1)
    network.add_host("leaf", 2, is_shaped=False)
    for number in range(8):
        network.add_host(f"rank{number}", 10 + number)
    return Parts(sumac, folder, network, {"leaf": []}, ["--lease", str(LEASE_S)], prefer_tree=False)


def behind_ports(count, prefer_tree=True):
    """Eight ranks, and so many devices, each behind a port of its own."""

    def devices_behind_ports(folder, sumac, network):
        hosts = [f"rank{number}" for number in range(8)]
        devices = [f"dpu{number}" for number in range(count)]
        network.add_switch("switch")
        network.add_host("controller", 1)
        for number, host in enumerate([*hosts, *devices]):
            network.add_host(host, 10 + number)
        fabric = namespaces.write_ports(os.path.join(folder, "fabric.toml"), hosts, devices)
        options = ["--lease", str(LEASE_S), "--topology", fabric]
        variables = {"SUMAC_HOST": "{host}"}
        return Parts(sumac, folder, network, {device: [] for device in devices}, options, variables, prefer_tree)

    devices_behind_ports.__name__ = f"{count}_devices_behind_ports"
    return devices_behind_ports


def shared_hosts(folder, sumac, network):
    """Two hosts for ranks, and one device, elsewhere."""
    add_hosts(network, {"controller": 1, "leaf": 2})
    return Parts(sumac, folder, network, {"leaf": []}, ["--lease", str(LEASE_S)])


def shared_hosts_and_shards(folder, sumac, network):
    """As `shared_hosts`; the device has three shards."""
    add_hosts(network, {"controller": 1, "leaf": 2})
    return Parts(sumac, folder, network, {"leaf": ["--shards", "3"]}, ["--lease", str(LEASE_S)])


def black_hole_and_shards(folder, sumac, network):
    """As before; the link of one host silently drops packets that its interface sends."""
    parts = shared_hosts_and_shards(folder, sumac, network)
    network.narrow("rank1", mtu=NARROW)
    return parts


def three_hosts(folder, sumac, network):
    """The hosts of the walk-through."""
    network.add_switch("switch")
    for host, number in {"head": 1, "node1": 11, "node2": 12}.items():
        network.add_host(host, number)
    return walkthrough.Hosts(sumac, folder, network)

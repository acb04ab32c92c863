"""Cases about the lengths of packets: they fit each path of the tree, and fill the narrowest, whatever ICMP says."""

import subprocess
import sys
import time

import too_big
from layouts import LEAST, NARROW
from namespaces import PACKET_STEP, on, wait_for, with_port
from parts import hosts_of, start_long_job

# How many rows show that a job goes on as before.
ROWS = 3


def run_by_the_tree(parts, hosts=None, **variables):
    options = ["-b", "64K", "-e", "256K", "-f", "4", "--algo", "tree", "-n", "5"]
    job = parts.start_job(hosts or hosts_of(parts), options, **variables)
    rows = job.finish()
    assert {row["path"] for row in rows} == {"tree"}, rows


def check_packets(parts, *mtus, step=PACKET_STEP):
    """Each tree until now must have had the longest packets that fit an MTU."""
    expected = [parts.network.family.packet_len(mtu, step) for mtu in mtus]
    assert parts.packet_lens() == expected, f"{parts.packet_lens()} instead of {expected}"


def packets_of_the_tree_fill_the_mtu(parts):
    run_by_the_tree(parts)
    check_packets(parts, parts.network.mtu)


def packets_of_the_tree_fit_the_narrowest_path(parts):
    run_by_the_tree(parts)
    check_packets(parts, NARROW)


def packets_of_the_tree_fit_the_least_mtu(parts):
    run_by_the_tree(parts)
    check_packets(parts, LEAST)


def packets_of_host_devices_fit_the_narrowest_path(parts):
    """The ranks of a host share its memory, so only devices send packets."""
    run_by_the_tree(parts, ["rank0", "rank0", "rank1", "rank1"])
    # In memory, chunks are whole cache lines.
    check_packets(parts, NARROW, step=64)


def check_shrinking(parts, narrow):
    job = start_long_job(parts)
    began = time.monotonic()
    narrow()
    shorter = parts.network.family.packet_len(NARROW)
    wait_for("a tree with shorter packets", lambda: parts.packet_lens()[-1] == shorter)
    print(f"a tree with shorter packets after {time.monotonic() - began:.1f} s")
    job.wait_for_row("a row by the tree", lambda row: row["path"] == "tree")
    recoveries = parts.status()["recoveries"]
    assert [found["took_ms"] is not None for found in recoveries] == [True], recoveries


def path_that_becomes_narrow_gets_a_tree_with_shorter_packets(parts):
    check_shrinking(parts, lambda: parts.network.narrow("rank1", mtu=NARROW))


def path_between_devices_that_becomes_narrow_gets_one_after_a_while(parts):
    check_shrinking(parts, lambda: parts.network.narrow("switch0-up", "switch0-down", mtu=NARROW))


def router_that_becomes_narrow_gets_a_tree_with_shorter_packets(parts):
    check_shrinking(parts, lambda: parts.network.narrow_router(NARROW))
    rank, leaf = hosts_of(parts)[0], parts.network.addresses["leaf"]
    told = parts.network.path_mtu(rank, leaf)
    assert told in ([None] if parts.network.is_silent else [None, NARROW]), f"{rank} was told {told}"


def forged_messages_about_long_packets_change_nothing(parts):
    """A host that sees nothing of the job's traffic reports that all packets are too long."""
    job = start_long_job(parts)
    network, leaf = parts.network, parts.devices_of_the_job()[0]
    # As if ranks' packets were too long for the path to the device, and the device's for those to ranks.
    ends = [(rank, leaf) for rank in hosts_of(parts)] + [(leaf, rank) for rank in hosts_of(parts)]
    for victim, peer in ends:
        listed = subprocess.run(on(victim, too_big.LIST), check=True, capture_output=True, text=True).stdout
        addresses = network.addresses[victim], network.addresses[peer]
        for port in too_big.ports(listed):
            subprocess.run(on("spare", [sys.executable, too_big.__file__, *addresses, str(port), str(LEAST)]), check=True)
        told = wait_for(f"{victim} to believe it", lambda: network.path_mtu(victim, addresses[1]))
        assert told == LEAST, f"{victim} was told {told}"
    for _ in range(ROWS):
        job.wait_for_row("a row by the tree", lambda row: row["path"] == "tree")
    recoveries = parts.status()["recoveries"]
    assert not recoveries, recoveries
    job.end()
    wait_for("the end of the job", lambda: not parts.status()["jobs"])
    # The route is the one that they have been told about.
    run_by_the_tree(parts, SUMAC_UDP_PEER=with_port(network.addresses[leaf], too_big.PEER_PORT))
    check_packets(parts, network.mtu, network.mtu)

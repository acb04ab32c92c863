"""What happens to jobs when ranks are killed, ports go down, addresses change, and firmware is reset."""

import time

from baselines import attempt
from jobs import ROW_S, Cluster, by_tree
from machine import resources
from remote import Failed
from results import Skip

# How long the loss of a rank may take to be reported, and a tree to be used again after a fault.
LOSS_S = 60
BACK_S = 180
# Rows of many sizes, of which one ends every few milliseconds, on Soft-RoCE every second; perf takes up to 100,000 of
# them. The jobs outlast each fault.
LONG = ["--algo", "auto", "-b", "64K", "-e", "460K", "-i", 4, "-w", 0, "-n", 50]
LONG_QUICK = ["--algo", "auto", "-b", "16K", "-e", "64K", "-i", 4, "-w", 0, "-n", 2]

# Runs on the machine by itself, since the connection may not survive it. Whatever fails, the end is tried, and the
# interface's routes are restored.
INTERRUPTED = """\
routes=$(ip -4 route show dev {interface})
{begin}
sleep {seconds}
{end}
echo "$routes" | while read -r route; do [ -z "$route" ] || ip route replace $route dev {interface} 2>/dev/null || true; done
echo done >{folder}/interrupted
"""
RESET_S = 300


def part(results, name, hosts, options):
    with Cluster(hosts) as cluster:
        cluster.long = LONG_QUICK if options.quick else LONG
        attempt(results, name, "B", f"rank killed {options.kills} times", lambda: killed_ranks(results, name, cluster, options.kills))
        attempt(results, name, "ARM", "device killed", lambda: killed_device(results, name, cluster))
        attempt(results, name, "B", f"port down for {options.down} s", lambda: port_down(results, name, cluster, options.down))
        attempt(results, name, "B", "address removed and added", lambda: address_changed(results, name, cluster))
        attempt(results, name, "B", "firmware reset", lambda: firmware_reset(results, name, cluster, options.reset))


def works(cluster, transport="rdma", limit_s=BACK_S):
    """Run jobs until one is by the tree over this transport; return the seconds that it took."""
    began = time.monotonic()
    while True:
        with cluster.job(transport, ["--algo", "auto", "-b", "64K", "-e", "64K", "-n", 2]) as job:
            try:
                rows = job.finish(ROW_S)
                if rows and by_tree(transport)(rows[-1]):
                    return time.monotonic() - began
                why = f"its rows are by {rows[-1]['path'] if rows else 'nothing'}"
            except Failed as error:
                why = str(error)
        if time.monotonic() - began > limit_s:
            raise Failed(f"no job by the tree over {transport} within {limit_s} s: {why}")


def lost(cluster, transport):
    """Kill rank 1 in the middle of a job; return the milliseconds after which rank 0 has named it."""
    with cluster.job(transport, cluster.long) as job:
        job.row(by_tree(transport), ROW_S)
        began = time.monotonic()
        job.ranks[1].kill("KILL")
        status = job.ranks[0].wait(LOSS_S)
        took = 1000 * (time.monotonic() - began)
        text = job.ranks[0].text()
        if status != 1 or "rank 1 is lost" not in text:
            raise Failed(f"rank 0 has ended with status {status}, and does not name rank 1: {text[-300:]}")
    return took


def killed_ranks(results, name, cluster, count):
    works(cluster)
    before = resources(cluster.card)
    times = sorted(lost(cluster, "rdma") for _ in range(count))
    results.add(name, "A", "a killed rank is named after (median)", times[count // 2], "ms", f"at most {times[-1]:.0f} ms")
    works(cluster)
    # The device has given back what it had for them: queue pairs now or soon, and receive buffers, without which the
    # last job would not have worked.
    end = time.monotonic() + LOSS_S
    while kept := grown(before, resources(cluster.card)):
        if time.monotonic() > end:
            raise Failed(f"objects of the device before and after: {kept}")
        time.sleep(1)


def grown(before, after):
    return {kind: (before.get(kind), after[kind]) for kind in ("qp", "cq", "pd") if after.get(kind, 0) > before.get(kind, 0)}


def killed_device(results, name, cluster):
    with cluster.job("rdma", cluster.long) as job:
        job.row(by_tree("rdma"), ROW_S)
        cluster.device.kill("KILL")
        seen, began = len(job.ranks[0].lines), time.monotonic()
        job.row(lambda row: row.get("path") != "tree", LOSS_S, seen)
        results.add(name, "A", "first result without the device after", time.monotonic() - began, "s")
        cluster.start_device()
        seen, began = len(job.ranks[0].lines), time.monotonic()
        job.row(by_tree("rdma"), BACK_S, seen)
        results.add(name, "A", "tree used again after", time.monotonic() - began, "s")


def guard(host):
    """Refuse to interrupt what ssh goes by."""
    if not host.interface:
        raise Skip("the port has no network interface")
    client = host.output('echo "${SSH_CONNECTION%% *}"').strip()
    if not client:
        raise Skip("ssh does not say where it comes from, so its interface is not known")
    route = host.output(["ip", "route", "get", client])
    if f"dev {host.interface} " in route:
        raise Skip(f"ssh reaches the machine by {host.interface}")


def interrupt(cluster, begin, end, seconds, transport="rdma"):
    """Interrupt B's port in the middle of a job. Its ranks go on, or name what is lost; a later job works."""
    host, folder = cluster.second, cluster.folders[cluster.second]
    guard(host)
    script = INTERRUPTED.format(interface=host.interface, begin=begin, end=end, seconds=seconds, folder=folder)
    host.put(f"{folder}/interrupt", script)
    with cluster.job(transport, cluster.long) as job:
        job.row(by_tree(transport), ROW_S)
        host.run(f"rm -f {folder}/interrupted; (trap '' HUP; sh {folder}/interrupt) >{folder}/log 2>&1 </dev/null &")
        host.run(f"until [ -e {folder}/interrupted ]; do sleep 1; done", seconds + LOSS_S)
        seen = len(job.ranks[0].lines)
        try:
            row = job.row(lambda _: True, BACK_S, seen)
            outcome = f"the job goes on by {row['path']}"
        except Failed:
            status, text = job.ranks[0].wait(LOSS_S), job.ranks[0].text()
            if status != 1 or "error:" not in text:
                raise
            outcome = f"the job ended: {text.splitlines()[-1]}"
    return outcome


def port_down(results, name, cluster, seconds):
    host = cluster.second
    outcome = interrupt(cluster, f"ip link set {host.interface} down", f"ip link set {host.interface} up", seconds)
    results.add(name, "B", "jobs by the tree again after", works(cluster), "s")
    return outcome


def address_changed(results, name, cluster):
    host = cluster.second
    lines = host.output(["ip", "-o", "-4", "address", "show", "dev", host.interface] if host.interface else "true").split()
    address = next((word for word in lines if word.startswith(host.link.address + "/")), None)
    if address is None:
        raise Skip(f"{host.link.address} is not an address of {host.interface or 'a network interface'}")
    begin, end = (f"ip address {what} {address} dev {host.interface}" for what in ("del", "add"))
    outcome = interrupt(cluster, begin, end, 2)
    results.add(name, "B", "jobs by the tree again after", works(cluster), "s")
    return outcome


def firmware_reset(results, name, cluster, wanted):
    host = cluster.second
    if host.is_soft:
        raise Skip("Soft-RoCE has no firmware")
    if not wanted:
        raise Skip("only with --reset")
    if host.run("command -v mlxfwreset", check=False).returncode != 0:
        raise Skip("no mlxfwreset; it is a tool of NVIDIA's firmware tools (MFT)")
    guard(host)
    with cluster.job("rdma", cluster.long) as job:
        job.row(by_tree("rdma"), ROW_S)
        host.run(["mlxfwreset", "--device", host.pci, "--yes", "reset"], RESET_S)
        # Either rank may be the one that reports it.
        job.ranks[0].wait(BACK_S)
    state = f"/sys/class/infiniband/{host.link.device}/ports/{host.link.port}/state"
    host.run(f"until grep -q ACTIVE {state}; do sleep 1; done", RESET_S)
    results.add(name, "B", "jobs by the tree again after", works(cluster, limit_s=RESET_S), "s")
    return "each rank's job has ended"

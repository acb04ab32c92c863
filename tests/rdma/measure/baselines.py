"""perftest between the machines, and Sumac's own programs on one port and between two."""

import itertools
import re

from remote import SHORT_S, Failed, last
from results import Skip

# (program, lengths in bytes); the rates of large messages are what a link can do.
TOOLS = [("ib_write_bw", (4096, 65536, 1 << 20)), ("ib_read_bw", (4096, 65536, 1 << 20)), ("ib_send_lat", (64,))]
TCP_PORTS = itertools.cycle(range(18600, 18700))
LIMIT_S = 120
# Of a thousand connections, or of a wait for a dead peer.
CHECK_LIMIT_S = 300
CHECKS = ("conform", "count", "cycles", "sided", "engine", "messages")
# Those without a thousand connections.
CHECKS_QUICK = ("conform", "count", "engine", "messages")

LISTENS = "until grep -qi ':%04x [0:]* 0A' /proc/net/tcp /proc/net/tcp6; do sleep 1; done"
RATE = re.compile(r"^rate (\w+) (\d+) B ([0-9.]+) Gbit/s$")
LATENCY = re.compile(r"^latency (\w+) (\d+) B ([0-9.]+) us, p99 ([0-9.]+) us$")


def pairs(hosts):
    """Return (first, second) machines whose ports differ, each once."""
    found = []
    for first, second in itertools.combinations(hosts, 2):
        is_known = any({first.link.address, second.link.address} == {a.link.address, b.link.address} for a, b in found)
        if first.link.address != second.link.address and not is_known:
            found.append((first, second))
    return found


def distinct(hosts):
    """Return machines with different ports."""
    return [host for nth, host in enumerate(hosts) if all(host.link.address != other.link.address for other in hosts[:nth])]


def perftest(results, part, hosts, options):
    for one, other in pairs(hosts):
        for client, server in ((one, other), (other, one)):
            where = f"{client.label}->{server.label}"
            for tool, lengths in TOOLS:
                for length in lengths:
                    what = f"{tool} {length} B"
                    try:
                        value, unit, note = one_tool(tool, length, client, server, options.writes)
                        results.add(part, where, what, value, unit, note)
                    except Failed as error:
                        results.fail(part, where, what, error)


def one_tool(tool, length, client, server, count):
    tcp = next(TCP_PORTS)
    # perftest wants at least five round trips, and its default queue has 128 entries.
    common = ["-F", "-s", length, "-n", count, "-p", tcp, *(["--report_gbits"] if tool.endswith("bw") else [])]
    with server.start([tool, *server.link.perftest(), *common]) as listening:
        # The server's output is buffered, so wait for its socket.
        server.run(["timeout", SHORT_S, "sh", "-c", LISTENS % tcp], SHORT_S + 5)
        text = client.run([tool, *client.link.perftest(), *common, server.link.address], LIMIT_S).stdout
        listening.finish(SHORT_S)
    return parse(tool, text, length)


def parse(tool, text, length):
    """Return (value, unit, note) of perftest's row for this length."""
    row = next((words for words in map(str.split, text.splitlines()) if len(words) > 4 and words[0] == str(length)), None)
    if row is None:
        raise Failed(f"{tool} has printed no row for {length} bytes: {last(text)}")
    if tool.endswith("bw"):
        return float(row[3]), "Gbit/s", ""
    # Columns: bytes, iterations, min, max, typical, average, deviation, 99 %, 99.9 %.
    return float(row[4]), "us", f"p99 {float(row[7])} us"


def conformance(results, part, hosts, options):
    for host in distinct(hosts):
        for check in CHECKS_QUICK if options.quick else CHECKS:
            attempt(results, part, host.label, f"verbs {check}", lambda check=check, host=host: one_check(host, check))
        attempt(results, part, host.label, "verbs memcpy", lambda host=host: copies(results, part, host))
    first, card, _ = hosts
    attempt(results, part, f"{card.label}->{first.label}", "alias keys", lambda: exported(first, card))


def attempt(results, part, where, what, work):
    """Do this, and note its result."""
    try:
        note = work()
        results.add(part, where, what, note=note or "")
    except Skip as reason:
        results.skip(part, where, what, reason)
    except Failed as error:
        results.fail(part, where, what, error)


def one_check(host, check):
    link = host.link.verbs()
    text = host.output(["verbs", check, link, link], CHECK_LIMIT_S)
    if f"ok {check}" not in text.splitlines():
        raise Failed(f"{host.label}: verbs {check}: {last(text)}")


def copies(results, part, host):
    """Check the DMA engine of a card; print its rates beside the processor's."""
    done = host.run(["verbs", "memcpy", host.link.verbs()], CHECK_LIMIT_S, check=False)
    refused = re.search(r"^no DMA engine: (.*)$", done.stderr, re.MULTILINE)
    if refused:
        raise Skip(refused[1])
    if done.returncode != 0:
        raise Failed(f"{host.label}: verbs memcpy: {last(done.stderr)}")
    for length, rate, share in re.findall(r"^(\d+) B: ([0-9.]+) GB/s, ([0-9.]+) of", done.stdout, re.MULTILINE):
        results.add(part, host.label, f"copies by the engine, {length} B", float(rate), "GB/s", f"{share} of the processor's")


def exported(host, card):
    """Let the engine of a card read and write memory that its host exports."""
    with host.start(["verbs", "export", host.link.verbs()]) as server:
        line = server.until(lambda line: line.startswith(("grant ", "no export: ")), SHORT_S)
        if line.startswith("no export: "):
            raise Skip(line.removeprefix("no export: "))
        done = card.run(["verbs", "memcpy", card.link.verbs(), "-"], CHECK_LIMIT_S, check=False, text=line.split()[1])
        refused = re.search(r"^no DMA engine: (.*)$", done.stderr, re.MULTILINE)
        if refused:
            raise Skip(refused[1])
        if done.returncode != 0:
            raise Failed(f"{card.label}: verbs memcpy with a grant: {last(done.stderr)}")
        return last(server.finish(SHORT_S), 1)


def between(results, part, hosts, options):
    for one, other in pairs(hosts):
        for listening, connecting in ((one, other), (other, one)):
            where = f"{connecting.label}->{listening.label}"
            attempt(results, part, where, "verbs two", lambda c=connecting, s=listening, w=where: two(results, part, c, s, w))


def two(results, part, connecting, listening, where):
    with listening.start(["verbs", "two", listening.link.verbs()]) as server:
        with connecting.start(["verbs", "two", connecting.link.verbs(), listening.link.address]) as client:
            text = client.finish(CHECK_LIMIT_S)
        seen = server.finish(SHORT_S)
    for line in [*text.splitlines(), *seen.splitlines()]:
        rate, latency = RATE.match(line), LATENCY.match(line)
        if rate:
            # The listening side measures what it writes by itself.
            results.add(part, where, f"rate of {rate[1]}s, {rate[2]} B", float(rate[3]), "Gbit/s")
        elif latency:
            what = f"latency of a {latency[1]}, {latency[2]} B"
            results.add(part, where, what, float(latency[3]), "us", f"p99 {float(latency[4])} us")
    noted = [line for line in seen.splitlines() if line.startswith(("fenced", "a killed process"))]
    if "ok two" not in text or "ok two" not in seen or len(noted) != 2:
        raise Failed(f"{last(text)}; {last(seen)}")
    return "; ".join(noted)

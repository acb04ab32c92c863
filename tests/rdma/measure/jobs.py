"""Jobs of two ranks on different machines with their device on the card: its packets, and zero-copy."""

import itertools
import json

from baselines import attempt
from remote import SHORT_S, Failed, last

TENANT = "measure"
LEAF = "leaf0"
# Until a job has its ranks, or a device has reached its controller.
JOIN_S = 120
ROW_S = 300
PORT = 7847
LARGE = (65536, 1 << 20)
TRANSPORTS = {"packets": "verbs", "zero-copy": "rdma"}


class Cluster:
    """A controller on A, a device on the card (ARM), and jobs of a rank each on A and B."""

    def __init__(self, hosts):
        self.first, self.card, self.second = hosts
        self.controller_at = f"{self.first.link.address}:{PORT}"
        self.folders = {}
        self.controller = self.device = None
        self._numbers = itertools.count()

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def _start(self):
        for host in {self.first, self.card, self.second}:
            self.folders[host] = host.output(["mktemp", "-d"]).strip()
        folder = self.folders[self.first]
        for kind in (["--device", LEAF], ["--tenant", TENANT], ["--operator"]):
            name = kind[-1].strip("-")
            self.first.run(["sumac", "key", "new", "--keys", f"{folder}/keys.toml", *kind, "--output", f"{folder}/{name}.key"])
        for host, name in ((self.card, LEAF), (self.second, TENANT)):
            host.put(f"{self.folders[host]}/{name}.key", self.first.output(["cat", f"{folder}/{name}.key"]))
        listen = ["--listen", self.controller_at, "--keys", f"{folder}/keys.toml", "--prefer-tree"]
        self.controller = self.first.start(["sumac", "controller", *listen])
        self.controller.until(lambda line: "listening" in line, SHORT_S)
        self.start_device()

    def start_device(self):
        link, key = self.card.link.verbs(), f"{self.folders[self.card]}/{LEAF}.key"
        options = ["--verbs", link, "--rdma", link, "--bind", self.card.link.address, "--timeout", JOIN_S]
        self.device = self.card.start(
            ["sumac", "device", "--name", LEAF, "--controller", self.controller_at, "--key-file", key, *options]
        )
        self.device.until(lambda line: f"ready {LEAF}" in line, JOIN_S)

    def restart_device(self):
        self.device.kill()
        self.start_device()

    def stop(self):
        for program in filter(None, (self.device, self.controller)):
            program.kill()
        for host, folder in self.folders.items():
            host.run(["rm", "-r", folder], check=False)

    def status(self):
        key = f"{self.folders[self.first]}/operator.key"
        return json.loads(self.first.output(["sumac", "status", "--json", "--controller", self.controller_at, "--key-file", key]))

    def job(self, transport, options):
        """Start `sumac perf` on A, which prints rows, and on B."""
        name = f"{transport}-{next(self._numbers)}"
        return Job([self._rank(number, host, name, transport, options) for number, host in enumerate((self.first, self.second))])

    def _rank(self, number, host, job, transport, options):
        environment = dict(
            SUMAC_CONTROLLER=self.controller_at,
            SUMAC_KEY_FILE=f"{self.folders[host]}/{TENANT}.key",
            SUMAC_TENANT=TENANT,
            SUMAC_JOB=job,
            SUMAC_RANK=number,
            SUMAC_WORLD=2,
            SUMAC_BIND=host.link.address,
            SUMAC_JOIN_TIMEOUT=JOIN_S,
        )
        command = ["sumac", "perf", "--transport", transport, "--verbs", host.link.verbs(), "--buffers", "in-place", "--json"]
        return host.start([*command, *options], environment)


class Job:
    def __init__(self, ranks):
        self.ranks = ranks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill("KILL")

    def row(self, wanted, limit_s, after=0):
        """Return the first complete row of rank 0 behind `after` lines for which `wanted` holds; all must be right."""
        return parsed(self.ranks[0].until(lambda line: (row := parsed(line)) is not None and wanted(row), limit_s, after))

    def finish(self, limit_s):
        """Wait until both ranks have succeeded; return rank 0's rows."""
        text = self.ranks[0].finish(limit_s)
        self.ranks[1].finish(SHORT_S)
        return [row for row in map(parsed, text.splitlines()) if row]


def parsed(line):
    """Return a row that `sumac perf` has printed, or None for other lines."""
    if not (line.startswith("{") and line.endswith("}")):
        return None
    row = json.loads(line)
    if row.get("wrong", 0) != 0:
        raise Failed(f"wrong elements: {line}")
    return row if "size_bytes" in row else None


def by_tree(transport):
    return lambda row: row.get("path") == "tree" and row.get("transport") == transport


def part(name):
    """Return the part that measures all-reduces by this transport, by `sumac perf` and by `sumac selftest`."""

    def measure(results, part, hosts, options):
        transport = TRANSPORTS[name]
        with Cluster(hosts) as cluster:
            attempt(results, part, "A+B", "all-reduce", lambda: all_reduce(results, part, cluster, transport, options))
            attempt(results, part, "A", "selftest", lambda: selftest(results, part, cluster, transport, options))

    return measure


def all_reduce(results, part, cluster, transport, options):
    sizes = ["-b", 8, "-e", "64K", "-f", 64, "-n", 5] if options.quick else ["-b", 8, "-e", "256M", "-f", 8, "-n", 20]
    with cluster.job(transport, ["--algo", "tree", *sizes]) as job:
        rows = job.finish(ROW_S)
    if not rows or not all(map(by_tree(transport), rows)):
        raise Failed(f"not all rows are by the tree over {transport}: {[(row.get('path'), row.get('transport')) for row in rows]}")
    # What perftest writes from B to the device's machine, which may be A.
    best = max(results.value("baselines", f"B->{to}", f"ib_write_bw {length} B") or 0 for to in ("ARM", "A") for length in LARGE)
    for row in rows:
        size = row["size_bytes"]
        results.add(part, "A+B", f"all-reduce, {size} B, time", row["time_us"], "us")
        rate = size * 8e-3 / row["time_us"]
        share = f"{100 * rate / best:.1f} % of ib_write_bw" if best else ""
        results.add(part, "A+B", f"all-reduce, {size} B, rate", rate, "Gbit/s", share)
    return f"{len(rows)} rows, every element checked"


def selftest(results, part, cluster, transport, options):
    key = f"{cluster.folders[cluster.first]}/operator.key"
    small = ["-n", 20, "-e", "256K"] if options.quick else ["-n", 1000, "-e", "64M"]
    command = ["sumac", "selftest", "--json", "--controller", cluster.controller_at, "--key-file", key, "--device", LEAF]
    command += ["--transport", transport, "--verbs", cluster.first.link.verbs(), *small]
    done = cluster.first.run(command, ROW_S, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not rows:
        raise Failed(f"status {done.returncode}: {last(done.stderr or done.stdout)}")
    row = rows[0]
    results.add(part, "A", "selftest, latency", row["latency_us"], "us")
    results.add(part, "A", "selftest, bandwidth", row["bandwidth_gbytes_s"] * 8, "Gbit/s")

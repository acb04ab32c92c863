"""Sumac's parts on a network of namespaces: a controller, devices and ranks, each on its host and with its key."""

import contextlib
import json
import os
import re
import subprocess
import time

from namespaces import LIMIT, on, wait_for, with_port

TENANT = "ml"
# A device that gets nothing for this long gets nothing.
STILL_S = 0.3
# Where a device behind a relay receives, and where the relay does.
DATA_PORT, RELAY_PORT = 7100, 7200


def behind_relay(network, name):
    """Return the options of a device that is reached through `Parts.start_relay` only."""
    return ["--data-port", str(DATA_PORT), "--advertise", with_port(network.addresses[name], RELAY_PORT)]


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


class Parts:
    """A controller on the host `controller`, devices on hosts with their names, and the keys of all parts.

    `devices` are the options of each device, `options` those of the controller, `variables` those of all ranks, in
    which `{host}` stands for the host. Jobs take the tree by default, or what costs least.
    """

    def __init__(self, sumac, folder, network, devices, options=(), variables=None, prefer_tree=True):
        self.sumac, self.folder, self.network, self.options_of = sumac, folder, network, devices
        self.variables = variables or {}
        self.processes, self.jobs = [], 0
        self.by_host = {}
        self.keys = os.path.join(folder, "keys.toml")
        principals = [(name, "--device", name) for name in devices]
        for name, *whose in [*principals, (TENANT, "--tenant", TENANT), ("operator", "--operator")]:
            run = [sumac, "key", "new", "--keys", self.keys, *whose, "--output", self.key(name)]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        self.start_controller(["--prefer-tree", *options] if prefer_tree else options)
        for name in devices:
            self.start_device(name)

    def key(self, name):
        return os.path.join(self.folder, f"{name}.key")

    @property
    def controller(self):
        return self.network.addresses["controller"]

    def start(self, host, arguments, **options):
        """Start the command on a host. What it prints goes to the log of the host, unless `options` say otherwise."""
        with open(os.path.join(self.folder, f"{host}.log"), "a", encoding="utf-8") as log:
            command = on(host, [self.sumac, *arguments])
            process = subprocess.Popen(command, stdout=options.pop("stdout", log), stderr=log, **options)
        self.processes.append(process)
        self.by_host[host] = process
        return process

    def start_controller(self, options):
        listen = ["--listen", with_port(self.controller, 7847), *options]
        variables = {**os.environ, "SUMAC_LOG": "warn,sumac::controller::state=info"}
        self.start("controller", ["controller", "--keys", self.keys, *listen], env=variables)
        # It answers before devices look for it.
        wait_for("the controller's first report", self.status)

    def start_device(self, name):
        of_controller = ["--controller", self.controller, "--key-file", self.key(name)]
        self.start(name, ["device", "--name", name, *of_controller, *self.options_of[name]])
        wait_for(f"the registration of {name}", lambda: name in self.devices())

    @contextlib.contextmanager
    def relay(self, name, direction, rules):
        """Run the relay in front of a device, which must lose packets in this direction by these rules."""
        path, output = (os.path.join(self.folder, f"relay.{suffix}") for suffix in ("toml", "output"))
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"[[rule]]\ndirection = '{direction}'\n{rules}\n")
        listen, to = (with_port(self.network.addresses[name], port) for port in (RELAY_PORT, DATA_PORT))
        with open(output, "w", encoding="utf-8") as stdout:
            arguments = ["chaos", "--listen", listen, "--to", to, "--rules", path, "--json"]
            relay = self.start(name, arguments, stdout=stdout)
        lines = wait_for("the relay", lambda: read(output).splitlines())
        assert lines[0].startswith("relaying"), lines
        yield
        relay.terminate()
        relay.wait(LIMIT)
        counters = json.loads(read(output).splitlines()[-1])
        assert counters[direction]["lost"] > 0, counters

    def status(self):
        of_controller = ["--controller", self.controller, "--key-file", self.key("operator")]
        command = on("controller", [self.sumac, "status", "--json", *of_controller])
        found = subprocess.run(command, capture_output=True, text=True)
        return json.loads(found.stdout) if found.returncode == 0 else None

    def devices(self):
        return {device["name"]: device for device in (self.status() or {"devices": []})["devices"]}

    def start_job(self, hosts, arguments, **variables):
        """Start `sumac perf` as the ranks of a job, of which rank n is on the n-th of the hosts."""
        self.jobs += 1
        path = os.path.join(self.folder, f"rows{self.jobs}")
        ranks = []
        with open(path, "w", encoding="utf-8") as output:
            for rank, host in enumerate(hosts):
                of_rank = {"SUMAC_RANK": rank, "SUMAC_WORLD": len(hosts), "SUMAC_LOCAL_RANK": hosts[:rank].count(host)}
                of_key = {"SUMAC_KEY_FILE": self.key(TENANT), "SUMAC_TENANT": TENANT, "SUMAC_JOB": "net"}
                of_job = {**of_rank, **of_key, "SUMAC_CONTROLLER": self.controller, **self.variables, **variables}
                values = {name: str(value).replace("{host}", host) for name, value in of_job.items()}
                options = {"env": {**os.environ, **values}, "stdout": output if rank == 0 else subprocess.DEVNULL}
                ranks.append(self.start(host, ["perf", "--json", *arguments], **options))
        return Job(ranks, path)

    def contributions(self, device):
        stats = self.devices().get(device, {}).get("stats", {})
        return stats["Ok"]["counters"]["contributions"] if "Ok" in stats else 0

    def serves(self, device):
        """Whether the device gets contributions now."""
        before, until = self.contributions(device), time.monotonic() + STILL_S
        while time.monotonic() < until:
            if self.contributions(device) > before:
                return True
        return False

    def devices_of_the_job(self):
        """Wait until the job has a tree. Returns the names of its devices."""

        def devices():
            trees = [job["tree"] for job in (self.status() or {"jobs": []})["jobs"] if job.get("tree")]
            return next((tree["Ok"]["devices"] for tree in trees if "Ok" in tree), None)

        return wait_for("a tree of the job", devices)

    def trees_of_the_job(self):
        """Return the group and the view of each tree of the job, by the first of its devices."""

        def trees():
            jobs = [job for job in (self.status() or {"jobs": []})["jobs"] if job.get("tree")]
            found = [tree for job in jobs for tree in (job, *job["stripes"]) if "Ok" in tree["tree"]]
            return {tree["tree"]["Ok"]["devices"][0]: (tree["tree"]["Ok"]["group"], tree["view"]) for tree in found}

        return wait_for("a tree of the job", trees)

    def packet_lens(self):
        """Return how long the packets of each tree until now are, in bytes."""
        log = read(os.path.join(self.folder, "controller.log"))
        return [int(length) for length in re.findall(r"tree reserved .*\bpacket_len_bytes=(\d+)", log)]

    def wait_for_repair(self, limit):
        """Wait until the job goes on after a loss."""

        def is_repaired():
            return any(found["took_ms"] is not None for found in (self.status() or {"recoveries": []})["recoveries"])

        wait_for("a repair", is_repaired, limit)

    def logs(self):
        """Return the names and the ends of all logs."""
        names = sorted(name for name in os.listdir(self.folder) if name.endswith(".log"))
        for name in names:
            yield name, read(os.path.join(self.folder, name))[-2000:]

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


class Job:
    """The ranks of a job, whose rows are right."""

    def __init__(self, ranks, path):
        self.ranks, self.path = ranks, path

    def rows(self):
        """Return the rows that were printed until now."""
        rows = [json.loads(line) for line in read(self.path).split("\n")[:-1]]
        wrong = [row for row in rows if row["wrong"] or row["out_of_place_wrong"]]
        assert not wrong, f"wrong elements: {wrong}"
        return rows

    def wait_for_row(self, what, condition, limit=LIMIT):
        """Wait for a row after those until now for which the condition holds."""
        before = len(self.rows())

        def found():
            self.check_alive()
            return next((row for row in self.rows()[before:] if condition(row)), None)

        return wait_for(what, found, limit)

    def check_alive(self):
        ended = [f"rank {number}" for number, rank in enumerate(self.ranks) if rank.poll() is not None]
        assert not ended, f"{', '.join(ended)} ended"

    def wait_for_exit(self, limit=LIMIT):
        """Wait until all ranks have ended. Returns their exit statuses."""
        return [rank.wait(timeout=limit) for rank in self.ranks]

    def finish(self):
        """Wait until the job has succeeded. Returns its rows."""
        codes = self.wait_for_exit()
        assert codes == [0] * len(codes), f"exit statuses {codes}"
        rows = self.rows()
        assert rows, "the job printed no row"
        return rows

    def end(self):
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def hosts_of(parts):
    """Return the hosts of the ranks."""
    return [host for host in parts.network.addresses if host.startswith("rank")]


def start_long_job(parts, *options):
    return start_long_job_of(parts, hosts_of(parts), *options)


def start_long_job_of(parts, hosts, *options):
    """Start a job that lasts longer than a case, and has a tree."""
    # A row for each of many sizes, so that the case can follow it.
    sizes = ["-b", "64K", "-e", "128K", "-i", "4", "-w", "0", "-n", "2", "--buffers", "in-place", "--algo", "auto"]
    job = parts.start_job(hosts, [*sizes, *options])
    parts.devices_of_the_job()
    job.wait_for_row("a row by the tree", lambda row: row["path"] == "tree")
    return job

"""Sumac's parts on a network of namespaces: a controller, devices and ranks, each on its host and with its key."""

import contextlib
import json
import os
import subprocess

from namespaces import LIMIT, on, wait_for

TENANT = "ml"


class Parts:
    """A controller on the host `controller`, devices on hosts with their names, and the keys of all parts."""

    def __init__(self, sumac, folder, network, devices, options=(), variables=None):
        self.sumac, self.folder, self.network = sumac, folder, network
        self.variables = variables or {}
        self.processes = []
        self.by_host = {}
        self.keys = os.path.join(folder, "keys.toml")
        principals = [(name, "--device", name) for name in devices]
        for name, *whose in [*principals, (TENANT, "--tenant", TENANT), ("operator", "--operator")]:
            run = [sumac, "key", "new", "--keys", self.keys, *whose, "--output", self.key(name)]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        self.start_controller(options)
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
        listen = ["--listen", f"{self.controller}:7847", "--prefer-tree", *options]
        self.start("controller", ["controller", "--keys", self.keys, *listen])
        # It answers before devices look for it.
        wait_for("the controller's first report", self.status)

    def start_device(self, name):
        of_controller = ["--controller", self.controller, "--key-file", self.key(name)]
        self.start(name, ["device", "--name", name, *of_controller])
        wait_for(f"the registration of {name}", lambda: name in self.devices())

    def status(self):
        of_controller = ["--controller", self.controller, "--key-file", self.key("operator")]
        command = on("controller", [self.sumac, "status", "--json", *of_controller])
        found = subprocess.run(command, capture_output=True, text=True)
        return json.loads(found.stdout) if found.returncode == 0 else None

    def devices(self):
        return {device["name"]: device for device in (self.status() or {"devices": []})["devices"]}

    def start_job(self, hosts, arguments, **variables):
        """Start `sumac perf` as the ranks of a job, of which rank n is on the n-th of the hosts."""
        ranks = []
        for rank, host in enumerate(hosts):
            of_rank = {"SUMAC_RANK": rank, "SUMAC_WORLD": len(hosts), "SUMAC_LOCAL_RANK": hosts[:rank].count(host)}
            of_key = {"SUMAC_KEY_FILE": self.key(TENANT), "SUMAC_TENANT": TENANT, "SUMAC_JOB": "net"}
            of_job = {**of_rank, **of_key, "SUMAC_CONTROLLER": self.controller, **self.variables, **variables}
            values = {name: str(value).replace("{host}", host) for name, value in of_job.items()}
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            options = {"env": {**os.environ, **values}, "stdout": output, "text": True}
            ranks.append(self.start(host, ["perf", "--json", *arguments], **options))
        return ranks

    def rows(self, ranks):
        """Wait for a job. Returns its rows, all of whose elements are right."""
        output, _ = ranks[0].communicate(timeout=2 * LIMIT)
        codes = [rank.wait(timeout=LIMIT) for rank in ranks]
        assert codes == [0] * len(ranks), f"exit statuses {codes}"
        rows = [json.loads(line) for line in output.splitlines()]
        wrong = [row for row in rows if row["wrong"] or row["out_of_place_wrong"]]
        assert rows and not wrong, f"wrong elements: {wrong}"
        return rows

    def contributions(self, device):
        stats = self.devices().get(device, {}).get("stats", {})
        return stats["Ok"]["counters"]["contributions"] if "Ok" in stats else 0

    def wait_until_busy(self, device):
        """Wait until the device has served more than it has now."""
        before = self.contributions(device)
        wait_for(f"a contribution to {device}", lambda: self.contributions(device) > before)

    def devices_of_the_job(self):
        """Wait until the job has a tree. Returns the names of its devices."""

        def devices():
            trees = [job["tree"] for job in (self.status() or {"jobs": []})["jobs"] if job.get("tree")]
            return next((tree["Ok"]["devices"] for tree in trees if "Ok" in tree), None)

        return wait_for("a tree of the job", devices)

    def logs(self):
        """Return the names and the ends of all logs."""
        names = sorted(name for name in os.listdir(self.folder) if name.endswith(".log"))
        for name in names:
            with open(os.path.join(self.folder, name), encoding="utf-8") as text:
                yield name, text.read()[-2000:]

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

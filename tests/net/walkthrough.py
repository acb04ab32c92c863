"""Follows a document that shows commands on several hosts.

A line that begins with "On `HOST`" names the host of the console blocks below it. All commands of a host run in one
shell, in a folder of its own, and must succeed. What the text behind a block says that something prints, as in
"prints `ready leaf1`", must have been printed on that host before the next block begins.
"""

import contextlib
import os
import re
import subprocess

import contenders
from namespaces import LIMIT, on, wait_for

# The folder with a host's files is at the same place on all hosts. Commands must not read those that follow.
HOME = """mount --bind {folder} {home} && cd {home} && exec bash /dev/fd/3 3<&0 </dev/null"""
PRELUDE = """
set -m
scp() {
    [ "$1" = -p ] || return 2
    local to=${!#}
    shift
    cp -p "${@:1:$#-1}" "$FOLDERS/${to%:}/"
}
"""


def steps(text):
    """Return (host, commands, what is printed) of each block.

    >>> steps("On `a`:\\n```console\\n$ b \\\\\\n  --c\\n$ d &\\n```\\nIt prints `e`.")
    [('a', ['b \\\\\\n  --c', 'd &'], ['e'])]
    """
    found, host = [], None
    for part in re.split(r"(?ms)^(```\w+\n.*?^```)$", text):
        if part.startswith("```console\n"):
            body = part.removeprefix("```console\n").removesuffix("```")
            commands = [command.strip() for command in re.split(r"(?m)^\$ ", body) if command.strip()]
            found.append((host, commands, []))
        else:
            for match in re.finditer(r"(?m)^On `(\w+)`|prints `([^`]+)`", part):
                if match[1]:
                    host = match[1]
                elif found:
                    found[-1][2].append(match[2])
    return found


class Shell:
    """The shell of a user on a host."""

    def __init__(self, host, folders, home, variables):
        folder = os.path.join(folders, host)
        self.log, self.commands = os.path.join(folders, f"{host}.log"), 0
        script = os.path.join(folders, "prelude")
        with open(script, "w", encoding="utf-8") as file:
            file.write(PRELUDE)
        inside = HOME.format(folder=folder, home=home)
        command = on(host, ["unshare", "--mount", "sh", "-c", inside])
        with open(self.log, "w", encoding="utf-8") as log:
            options = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "text": True}
            self.process = subprocess.Popen(command, env={**os.environ, **variables}, **options)
        self.write(f". {script}\n")

    def write(self, text):
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def output(self):
        return read(self.log)

    def run(self, command):
        self.commands += 1
        path = f"{self.log}.{self.commands}"
        self.write(f"{command}\necho $? >{path}\n")
        found = wait_for(f"the end of {command!r}", lambda: read(path).strip(), 2 * LIMIT)
        assert found == "0", f"{command!r} ended with status {found}"


def read(path):
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        return file.read()
    return ""


class Hosts:
    """The hosts of a document, each with a folder of its own."""

    def __init__(self, sumac, folder, network):
        self.sumac, self.folder, self.network, self.shells = sumac, folder, network, {}
        self.home = os.path.join(folder, "home")
        for name in ["home", *network.addresses]:
            os.makedirs(os.path.join(folder, name))
        for host, address in network.addresses.items():
            os.symlink(host, os.path.join(folder, address))

    def variables(self):
        prepare = f"mount --bind {self.folder}/$host {self.home} && "
        agent = contenders.write_agent(self.folder, self.network.addresses, prepare)
        mpi = {"OMPI_MCA_plm_rsh_agent": agent, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        path = f"{os.path.dirname(self.sumac)}:{os.environ['PATH']}"
        return {"FOLDERS": self.folder, "PATH": path, "HOME": self.home, **mpi}

    def follow(self, document):
        """Follow a document."""
        found, variables = steps(read(document)), self.variables()
        hosts = {host for host, *_ in found}
        assert found and hosts <= set(self.network.addresses), f"{document}: commands on {hosts}"
        for host, commands, expected in found:
            if host not in self.shells:
                self.shells[host] = Shell(host, self.folder, self.home, variables)
            shell = self.shells[host]
            seen = len(shell.output())
            for command in commands:
                shell.run(command)
            for text in expected:
                # In this order.
                wait_for(f"{text!r} on {host}", lambda: text in shell.output()[seen:])
                seen = shell.output().index(text, seen) + len(text)

    def logs(self):
        """Return the names and the ends of all logs."""
        return [(host, shell.output()[-2000:]) for host, shell in self.shells.items()]

    def end(self):
        for shell in self.shells.values():
            shell.process.kill()
            shell.process.wait()

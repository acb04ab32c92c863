"""Machines that are reached by ssh, and programs that run there for a while."""

import shlex
import subprocess
import threading
import time

# Of a command that only reads or sets something.
SHORT_S = 30

# Runs a program until it ends or the connection does; a line names a signal to end it by.
SUPERVISED = """\
exec 3<&0
%s </dev/null 3<&- &
program=$!
{ read -r signal <&3 || signal=TERM; kill -$signal $program; } >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait $program
status=$?
kill $watcher 2>/dev/null
exit $status
"""


class Failed(Exception):
    """A command failed, or took too long."""


class Unreachable(Exception):
    """A machine cannot be reached, or lacks something."""


def quoted(command):
    """Return a command, a list or a text, as text for a shell."""
    return command if isinstance(command, str) else shlex.join(map(str, command))


class Host:
    """A machine: `label` is its place in the measurement (A, ARM, B)."""

    def __init__(self, label, destination, ssh):
        self.label = label
        self.destination = destination
        self._ssh = [*ssh, destination, "--"]
        # A folder of programs, searched first.
        self.path = None

    def ssh(self, text):
        found = f"PATH={shlex.quote(self.path)}:$PATH; export PATH\n" if self.path else ""
        return [*self._ssh, found + text]

    def run(self, command, limit_s=SHORT_S, check=True, text=None):
        """Run a command and return its completed process; `text` is its input."""
        try:
            done = subprocess.run(
                self.ssh(quoted(command)), input=text or "", capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{self.label}: not done after {limit_s} s: {quoted(command)}") from error
        if check and done.returncode != 0:
            raise Failed(f"{self.label}: status {done.returncode}: {quoted(command)}: {last(done.stderr or done.stdout)}")
        return done

    def output(self, command, limit_s=SHORT_S):
        return self.run(command, limit_s).stdout

    def start(self, command, environment=None):
        """Start a program; a command as text is one program with its arguments."""
        settings = "".join(f"{name}={shlex.quote(str(value))} " for name, value in (environment or {}).items())
        return Program(self, f"{settings}{quoted(command)}")

    def send(self, file, path, limit_s):
        """Copy a program."""
        path = shlex.quote(path)
        command = f"cat >{path}.part && chmod 755 {path}.part && mv {path}.part {path}"
        with open(file, "rb") as source:
            done = subprocess.run(self.ssh(command), stdin=source, capture_output=True, timeout=limit_s, check=False)
        if done.returncode != 0:
            raise Failed(f"{self.label}: cannot copy {file}: {last(done.stderr.decode())}")

    def forget(self):
        """Remove copied programs."""
        if self.path:
            self.run(["rm", "-r", self.path], check=False)

    def put(self, path, text):
        """Write a file that only its owner reads."""
        self.run(f"umask 077 && cat >{shlex.quote(path)}", text=text)


class Program:
    """A program on a machine; its output is collected by lines."""

    def __init__(self, host, command):
        self.host, self.command = host, command
        self.lines = []
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            host.ssh(SUPERVISED % command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def until(self, wanted, limit_s, after=0):
        """Return the first line behind the first `after` ones for which `wanted` holds."""
        end = time.monotonic() + limit_s
        with self._news:
            while True:
                # An ended program has no more lines once its reader has ended.
                is_over = not self._reader.is_alive()
                for line in self.lines[after:]:
                    if wanted(line):
                        return line
                left = end - time.monotonic()
                if is_over or left <= 0:
                    why = "has ended" if is_over else f"did not print it within {limit_s} s"
                    raise Failed(f"{self.host.label}: {why}: {self.command}: {last(self.text())}")
                self._news.wait(min(left, 1))

    def wait(self, limit_s):
        """Wait until it has ended by itself; return its status."""
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{self.host.label}: runs after {limit_s} s: {self.command}: {last(self.text())}") from error
        self._reader.join(SHORT_S)
        return status

    def finish(self, limit_s):
        """Wait until it has succeeded; return its output."""
        status = self.wait(limit_s)
        if status != 0:
            raise Failed(f"{self.host.label}: status {status}: {self.command}: {last(self.text())}")
        return self.text()

    def kill(self, signal="TERM"):
        """End it, if it has not ended; return its status."""
        if self._process.poll() is None:
            try:
                self._process.stdin.write(signal + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass
            try:
                self._process.wait(SHORT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(SHORT_S)
        return self._process.returncode

    def text(self):
        return "\n".join(self.lines)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def last(text, lines=3):
    """Return the end of an output in one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-lines:])[-600:]

"""Runs a command for no longer than it may, and leaves none of its processes behind."""

import contextlib
import os
import signal
import subprocess
import sys

# How long a command that is told to end gets for it: launchers remove their shared memory then.
END_S = 5
# In the environment of a command and of all that it starts. Some launchers put their ranks into sessions of their
# own, so neither a process group nor a session finds all of them.
MARK = "SUMAC_TEST_PEERS_RUN"

started = 0


class Failed(Exception):
    """A command that did not run, or ran wrong; with what it had printed by then."""

    def __init__(self, message, text=""):
        super().__init__(message)
        self.text = text


class CutOff(Failed):
    """A command that took longer than it may."""


def output(command, limit_s):
    """Return what a command prints."""
    global started
    started += 1
    mark = f"{os.getpid()}.{started}"
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(
            command, text=True, start_new_session=True, env={**os.environ, MARK: mark}, **pipes
        )
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from error
    try:
        text, log = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise CutOff(f"no end after {limit_s:.0f} s", end(process, mark)) from None
    except BaseException:
        end(process, mark)
        raise
    finally:
        sweep(mark)
    if process.returncode != 0:
        sys.stderr.write(log)
        raise Failed(f"exit status {process.returncode}: {' '.join(command)}", text)
    return text


def end(process, mark):
    """End a command and all that it started; return what it had printed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    sweep(mark)
    process.kill()
    try:
        return process.communicate(timeout=END_S)[0]
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(errors="replace")


def sweep(mark):
    """Kill what carries this mark."""
    wanted = f"{MARK}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        # A process may end while it is looked at, or be another user's.
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    os.kill(int(name), signal.SIGKILL)

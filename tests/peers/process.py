"""Runs a command under a time limit and leaves none of its processes behind."""

import contextlib
import os
import signal
import subprocess
import sys

# Grace period after SIGTERM, in which launchers remove their shared memory.
TERMINATE_S = 5
# Set in the environment of a command and inherited by its descendants. Some launchers put their ranks into sessions
# of their own, so neither a process group nor a session covers all of them.
RUN_ID = "SUMAC_TEST_PEERS_RUN"

started = 0


class Failed(Exception):
    """A command could not be started or failed; `text` is what it had printed until then."""

    def __init__(self, message, text=""):
        super().__init__(message)
        self.text = text


class TimedOut(Failed):
    """A command exceeded its time limit."""


def output(command, limit_s):
    """Run a command and return its standard output."""
    global started
    started += 1
    run_id = f"{os.getpid()}.{started}"
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(
            command, text=True, start_new_session=True, env={**os.environ, RUN_ID: run_id}, **pipes
        )
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from error
    try:
        text, log = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise TimedOut(f"timed out after {limit_s:.0f} s", terminate(process, run_id)) from None
    except BaseException:
        terminate(process, run_id)
        raise
    finally:
        kill_run(run_id)
    if process.returncode != 0:
        sys.stderr.write(log)
        raise Failed(f"exit status {process.returncode}: {' '.join(command)}", text)
    return text


def terminate(process, run_id):
    """Terminate a command and its descendants; return what it had printed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TERMINATE_S)
    kill_run(run_id)
    process.kill()
    try:
        return process.communicate(timeout=TERMINATE_S)[0]
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(errors="replace")


def kill_run(run_id):
    """Kill every process that belongs to this run."""
    variable = f"{RUN_ID}={run_id}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        # A process may exit while it is examined, or belong to another user.
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                if variable in file.read().split(b"\0"):
                    os.kill(int(name), signal.SIGKILL)

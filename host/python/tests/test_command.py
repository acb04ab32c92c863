"""The command from the wheel alone, and the program that it replaces itself by."""

import os
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

import sumac


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """An environment with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, with_pip=False)
    wheels = sorted(Path(os.environ["SUMAC_TEST_WHEELS"]).glob("sumac-*.whl"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(folder)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheels[-1])], check=True)
    return folder / "bin"


def run(*command, path="/nowhere"):
    ended = subprocess.run(list(map(str, command)), env={"PATH": path}, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("form", [["python", "-m", "sumac"], ["sumac"]])
def test_command_of_the_wheel_alone_runs_without_a_path(alone, form):
    command = [alone / form[0], *form[1:]]
    version = f"sumac {metadata.version('sumac')}\n"
    assert run(*command, "--version") == (0, version, "")
    assert run(*command, "no-such-command")[0] == 2


def without_program(alone, folder):
    """Return the command that runs the package without its program."""
    package = next(alone.parent.glob("lib/python3*/site-packages/sumac"))
    shutil.copytree(package, folder / "sumac", ignore=shutil.ignore_patterns("bin", "torch"))
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from sumac.__main__ import main; main()"
    return [alone / "python", "-I", "-c", code]


def test_package_without_the_program_takes_the_one_of_path_and_no_script(alone, tmp_path):
    command = without_program(alone, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sumac").symlink_to(shutil.which("echo"))
    # A script of this name, as pip installs it, would call this module again.
    assert run(*command, "status", "-x", path=f"{alone}:{tmp_path / 'bin'}") == (0, "status -x\n", "")
    code, _, error = run(*command, path=alone)
    assert code == 2 and "host/python/build" in error


def test_version_of_the_package_is_that_of_the_wheel():
    assert sumac.__version__ == metadata.version("sumac")

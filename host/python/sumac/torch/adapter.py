"""The adapter in C++ (adapter.cpp says what it is for): where it lies, how it is built, and whether it can be taken."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("adapter.cpp")
SETTING = "SUMAC_TORCH_ADAPTER"
"""The variable that names the folder of adapters; by default, that of this package."""
LIBRARIES = ("torch_python", "torch_cpu", "torch", "c10")
COMMAND = "python -m sumac.torch build"


class BuildError(Exception):
    """The adapter cannot be built here."""


def folder() -> Path:
    """Return the folder of adapters."""
    return Path(os.environ.get(SETTING) or SOURCE.parent)


def path() -> Path:
    """Return the path of the adapter for this torch, this interpreter and this source."""
    version = re.sub(r"[^A-Za-z0-9.]", "_", torch.__version__)
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return folder() / f"_adapter-{version}-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


@functools.cache
def load() -> tuple[Any, str]:
    """Return the adapter's module, or None, and what to tell about it."""
    place = path()
    if not place.exists():
        return None, f"none for torch {torch.__version__} in {place.parent}: {COMMAND}"
    owner = place.stat().st_uid
    if owner not in (0, os.getuid()):
        return None, f"{place} belongs to user {owner}, who is neither this one nor root: {COMMAND}, in another folder"
    try:
        return _import(place), f"built for torch {torch.__version__}"
    except ImportError as error:
        return None, f"{place} cannot be loaded, build it again by {COMMAND}: {error}"


def _import(place: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("sumac.torch._adapter", str(place))
    spec = importlib.util.spec_from_file_location(loader.name, place, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build() -> Path:
    """Build the adapter for this torch, and return its path. An adapter that is there is replaced."""
    place = path()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=place.parent, prefix=".build-")
    except OSError as error:
        raise BuildError(f"{place.parent} cannot be written: {error}; {SETTING} names another folder") from error
    with scratch:
        built = Path(scratch.name) / place.name
        _compile(built)
        try:
            _import(built)
        except ImportError as error:
            raise BuildError(f"the adapter was built, but cannot be loaded: {error}") from error
        built.replace(place)
    return place


def _compile(output: Path) -> None:
    root = Path(torch.__path__[0])
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise BuildError(f"there is no {headers / 'Python.h'}: install Python's headers (Debian: python3-dev)")
    include = root / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include", headers]
    # torch's classes are std::string's, with the library's old or new layout as torch was built.
    layout = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = [*shlex.split(os.environ.get("CXX") or "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [layout, *(f"-isystem{each}" for each in folders), str(SOURCE), "-o", str(output)]
    command += [f"-L{root / 'lib'}", *(f"-l{library}" for library in LIBRARIES)]
    try:
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be started: {error}; CXX names a compiler of C++20") from error
    if ended.returncode != 0:
        lines = "\n".join(ended.stderr.splitlines()[:20])
        raise BuildError(f"the compiler ended with status {ended.returncode}: {shlex.join(command)}\n{lines}")

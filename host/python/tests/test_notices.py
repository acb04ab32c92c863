"""The licences in the wheel: the project's, and those of the crates that its binaries contain."""

import doctest
import importlib.util
import os
import re
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "notices.py"
EXTENSION = "sumac/_sumac.abi3.so"
# These only tests, build scripts and macros use.
NOT_LINKED = "bindgen cbindgen criterion libfuzzer-sys loom proc-macro2 proptest pyo3-build-config pyo3-macros quote syn"


@pytest.fixture(scope="module")
def wheel():
    """Return the wheel's files by name; those of the folder of its metadata without that."""
    (path,) = Path(os.environ["SUMAC_TEST_WHEELS"]).glob("sumac-*.whl")
    with zipfile.ZipFile(path) as archive:
        return {re.sub(r"^sumac-[^/]*\.dist-info/", "", name): archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def notices(wheel):
    return wheel["licenses/THIRD-PARTY-NOTICES"].decode()


def crates_in(binary):
    """Return (name, version) of the crates whose sources the messages of a binary's panics name."""
    paths = re.findall(rb"/registry/src/[^/]+/([a-z][\w-]*?)-(\d+\.\d+\.\d+[\w.+-]*)/", binary)
    return {(name.decode(), version.decode()) for name, version in paths}


def test_wheel_has_the_licences_of_the_project(wheel):
    metadata = wheel["METADATA"].decode()
    for name in ("LICENSE-MIT", "LICENSE-APACHE", "THIRD-PARTY-NOTICES"):
        assert f"License-File: {name}\n" in metadata
    assert "License-Expression: MIT OR Apache-2.0" in metadata
    assert wheel["licenses/LICENSE-MIT"] == (SCRIPT.parents[2] / "LICENSE-MIT").read_bytes()
    assert wheel["licenses/LICENSE-APACHE"] == (SCRIPT.parents[2] / "LICENSE-APACHE").read_bytes()


@pytest.mark.parametrize("binary", [EXTENSION, "sumac/bin/sumac"])
def test_notices_name_every_crate_that_a_binary_contains(wheel, notices, binary):
    crates = crates_in(wheel[binary])
    assert len(crates) > 10 and (binary != EXTENSION or "pyo3" in {name for name, _ in crates})
    assert [crate for crate in sorted(crates) if "\n{} {}: ".format(*crate) not in notices] == []


@pytest.mark.parametrize("name", NOT_LINKED.split())
def test_notices_do_not_name_crates_that_are_not_linked(notices, name):
    assert f"\n{name} " not in notices


def test_each_crate_has_its_expression_and_texts_or_a_note(notices):
    listed, *texts = notices.split("=" * 80 + "\n")
    lines = listed.split("\n\n")[2].splitlines()
    assert len(lines) > 100 and lines[0].startswith("Rust's standard library ")
    for line in lines:
        assert re.fullmatch(r".* \d\S*: [\w. ()-]+(; https://\S+)?; (no licence file in its sources|text [\d, ]+)", line)
    numbers = {int(number) for line in lines for number in re.findall(r"(?:text|,) (\d+)", line)}
    assert numbers == set(range(1, len(texts) + 1)) and all(text.split("\n\n", 1)[1].strip() for text in texts)
    assert "BSD-3-Clause" in listed and "Neither the name" in notices


def test_examples_of_the_script_hold():
    spec = importlib.util.spec_from_file_location("notices", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module).failed == 0

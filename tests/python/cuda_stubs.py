#!/usr/bin/env python3
"""Makes libraries that stand in for CUDA's, so that torch's CUDA build can be imported where only its CPU part is used.

    tests/python/cuda_stubs.py SITE-PACKAGES    write them beside torch's own libraries, and check that torch imports

torch needs these libraries only to be loaded; no function of them is called on tensors in host memory. Each library that
is absent is made with exactly the symbols, and their versions, that torch's libraries take from it: every function ends
the program. This saves the download of gigabytes of libraries that nothing would run.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def needed(library):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", str(library)))


def version_files(library):
    """Return the file that each version of an undefined symbol is needed from."""
    files, current = {}, None
    for line in output("readelf", "-VW", str(library)).splitlines():
        if found := re.search(r"Version: \d+ +File: (\S+)", line):
            current = found[1]
        elif (found := re.search(r"Name: (\S+) +Flags: .* Version: \d+", line)) and current:
            files[found[1]] = current
    return files


def symbols(library):
    """Yield (name, version or None, whether it is defined, whether it is weak) of the dynamic symbols."""
    for line in output("readelf", "-W", "--dyn-syms", str(library)).splitlines():
        words = line.split()
        if len(words) < 8 or not words[0].rstrip(":").isdigit():
            continue
        name, _, version = words[7].partition("@")
        yield name, version.lstrip("@") or None, words[6] != "UND", words[4] == "WEAK"


def make(name, functions, folder, scratch):
    """Write a library with these functions, by version."""
    source = [f"void {function}(void) {{ __builtin_trap(); }}" for each in functions.values() for function in each]
    (scratch / "stub.c").write_text("\n".join(source) + "\n")
    script = [f"{version} {{ global: {'; '.join(sorted(each))}; }};" for version, each in functions.items() if version and each]
    (scratch / "stub.map").write_text("\n".join(script) + "\n")
    options = [f"-Wl,--version-script={scratch / 'stub.map'}"] if script else []
    command = ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", *options, "-o", folder / name, scratch / "stub.c"]
    subprocess.run(command, check=True)


def main():
    site = pathlib.Path(sys.argv[1])
    folder = site / "torch/lib"
    libraries = [path for path in folder.glob("*.so*") if not path.is_symlink()]
    system = re.findall(r"=> (/\S+)", output("ldconfig", "-p"))
    own = [*folder.glob("*.so*"), *(site / "nvidia").rglob("*.so*")]
    present = {path.name: path for path in [*map(pathlib.Path, reversed(system)), *own]}
    absent = sorted({name for library in libraries for name in needed(library)} - present.keys())
    wanted = {name: collections.defaultdict(set) for name in absent}
    defined, missing = set(), set()
    for library in {present[name] for each in libraries for name in needed(each) if name in present} | set(libraries):
        defined |= {name for name, _, is_defined, _ in symbols(library) if is_defined}
    for library in libraries:
        files = version_files(library)
        for name, version, is_defined, is_weak in symbols(library):
            if is_defined:
                continue
            if version is not None and files.get(version) in wanted:
                wanted[files[version]][version].add(name)
            elif version is None and not is_weak and name not in defined:
                missing.add(name)
    if absent:
        # Symbols without a version may come from any library.
        wanted[absent[0]][None] |= missing
    with tempfile.TemporaryDirectory() as scratch:
        for name, functions in wanted.items():
            make(name, functions, folder, pathlib.Path(scratch))
    print("stubs:", *absent)
    subprocess.run([pathlib.Path(sys.executable), "-c", "import torch; print('torch', torch.__version__)"], check=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Prints the notices that go with binaries: the licence of every crate that is linked into what these packages build.

    notices.py PACKAGE... [CARGO-OPTION...]    CARGO-OPTION: of the build, as --features verbs; those that select no
                                               crates are ignored

Crates that only build scripts, macros and tests use are left out, and so is the workspace itself. The texts come from the
crates' sources, and that of Rust's standard library from the toolchain. Exit status: 0; otherwise that of cargo.
"""

import argparse
import html
import json
import re
import subprocess
import sys
from pathlib import Path

FILES = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE")
RULE = "=" * 80

INTRODUCTION = """\
Third-party notices

The binaries contain Rust's standard library and the crates below, each under the licence that its line names.
Numbers refer to the texts, which follow. A crate's sources are at its address, unchanged.
"""


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def linked(packages, selection):
    """Return (name, version) of the crates that are linked into packages, each of which is built by itself."""
    tree = ["cargo", "tree", "--locked", "--edges=normal,no-proc-macro", "--prefix=none", "--format={p}", *selection]
    lines = "".join(output(*tree, "--package", package) for package in packages).splitlines()
    return {tuple(line.replace(" v", " ", 1).split()[:2]) for line in lines if line}


def is_licence(path):
    """Tell whether a file of a crate is a licence, by its path.

    >>> [is_licence(Path(name)) for name in ("LICENSE-MIT", "src/spin/COPYING.md", "src/license.rs", ".github/license.yml")]
    [True, True, False, False]
    """
    is_source = path.suffix in (".c", ".h", ".py", ".rs", ".sh") or any(part.startswith(".") for part in path.parts)
    return path.name.upper().startswith(FILES) and not is_source


def texts_of(package):
    """Return the texts of the licences and notices in a crate's sources."""
    root = Path(package["manifest_path"]).parent
    files = {path for path in root.rglob("*") if is_licence(path.relative_to(root)) and path.is_file()}
    if package["license_file"]:
        files.add(root / package["license_file"])
    return [path.read_text(encoding="utf-8", errors="replace").strip() for path in sorted(files)]


def as_text(page):
    """Return the text of a page in HTML.

    >>> as_text("<h1>A</h1>\\n\\n \\n<p>B &amp; C</p>")
    'A\\n\\nB & C'
    """
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(re.sub("<[^>]*>", "", page))).strip()


def standard_library():
    """Return the line and the texts of Rust's standard library."""
    version = output("rustc", "--version").split()[1]
    page = Path(output("rustc", "--print", "sysroot").strip(), "share/doc/rust/COPYRIGHT-library.html")
    texts = [as_text(page.read_text(encoding="utf-8"))] if page.exists() else []
    return f"Rust's standard library {version}: MIT OR Apache-2.0", texts


def entry(package):
    """Return the line and the texts of a crate."""
    # Old crates write "/" for "OR".
    licence = (package["license"] or "of its own").replace("/", " OR ")
    line = f"{package['name']} {package['version']}: {licence}"
    return line + (f"; {package['repository']}" if package["repository"] else ""), texts_of(package)


def notices(entries):
    """Return the document; texts that several crates share are printed once.

    >>> print(notices([("a 1: MIT", ["x"]), ("b 2: MIT", ["y", "x"]), ("c 3: MIT", [])]).split("unchanged.")[1].strip())
    a 1: MIT; text 1
    b 2: MIT; text 1, 2
    c 3: MIT; no licence file in its sources
    <BLANKLINE>
    ================================================================================
    Text 1
    <BLANKLINE>
    x
    <BLANKLINE>
    ================================================================================
    Text 2
    <BLANKLINE>
    y
    """
    numbers, lines = {}, []
    for line, texts in entries:
        own = sorted({numbers.setdefault(text, len(numbers) + 1) for text in texts})
        listed = ", ".join(map(str, own))
        lines.append(f"{line}; text {listed}" if own else f"{line}; no licence file in its sources")
    texts = [f"{RULE}\nText {number}\n\n{text}\n" for text, number in numbers.items()]
    return "\n".join([INTRODUCTION, *lines, "", *texts])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE")
    parser.add_argument("-F", "--features", action="append", default=[])
    parser.add_argument("--all-features", action="store_true")
    parser.add_argument("--no-default-features", action="store_true")
    parser.add_argument("--target")
    args, _ = parser.parse_known_args()
    selection = [f"--features={features}" for features in args.features]
    selection += ["--all-features"] * args.all_features + ["--no-default-features"] * args.no_default_features
    target = args.target or re.search("^host: (.*)$", output("rustc", "-vV"), re.MULTILINE)[1]
    crates = linked(args.packages, [*selection, f"--target={target}"])
    metadata = ["cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={target}", *selection]
    packages = json.loads(output(*metadata))["packages"]
    found = [package for package in packages if package["source"] and (package["name"], package["version"]) in crates]
    print(notices([standard_library(), *map(entry, sorted(found, key=lambda package: package["name"]))]), end="")


if __name__ == "__main__":
    sys.exit(main())

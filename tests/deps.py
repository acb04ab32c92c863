#!/usr/bin/env python3
"""Checks what the workspace depends on: licences, sources, and the direction of its own arrows.

Licences: every crate that any member can pull in, on any platform, must be usable under a licence that deny.toml
          allows.
Sources:  every foreign crate comes from a registry, not from a branch of somebody's repository.
Arrows:   every arrow ends in hal. `host` never names `device`, `device` never names `host`; neither names `hal::emu`
          (boards, tests and the command do the composing); inside hal, `emu` knows nothing of `wire`. The manifests
          say what a crate can name, ARROWS what it may; the sources are searched for what manifests can't show.
Folders:  inside a crate, no folder or file directly below `src` needs, through others, one that needs it (unit tests aside).
          The same holds for the files of some folders. comm needs engine, engine needs recovery, never the other way.
Locks:    what is searched by fuzzing (tests/fuzz, a workspace of its own) are the versions that the workspace has.
Planted:  the feature that plants bugs is switched on by a feature of its own name only, so nothing that ships has it.

    tests/deps.py              check; exit status 1 names every violation
    tests/deps.py --features   print 'package feature' for each feature of each member, and 'package -' for none
"""

import json
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What `cargo deny` is told (tests/deny/run), which also checks what this does not: duplicates, and RustSec's advisories.
POLICY = tomllib.loads((ROOT / "deny.toml").read_text(encoding="utf-8"))["licenses"]

# Licences that any crate may have, and those that single crates may have beside them.
ALLOWED = set(POLICY["allow"])
EXCEPTIONS = {entry["crate"]: set(entry["allow"]) for entry in POLICY["exceptions"]}

# Which members each member may depend on. A new member is an error until its place is stated here.
ANY = None
ARROWS = {
    "sumac-hal": set(),
    "sumac-device": {"sumac-hal"},
    "sumac": {"sumac-hal"},
    "sumac-firmware": {"sumac-hal", "sumac-device"},
    "sumac-bare": {"sumac-hal", "sumac-device"},
    "sumac-virtio": set(),
    "sumac-agent": {"sumac-hal", "sumac-firmware"},
    "sumac-cli": ANY,
    "sumac-tests": ANY,
}

# Features of hal that a member must not ask for: the emulated hardware, and for the device also std.
FORBIDDEN_FEATURES = {"sumac": {"emu"}, "sumac-device": {"emu", "std", "udp", "verbs"}}

# The workspace of the fuzz targets.
FUZZ = "tests/fuzz"

# The feature for bugs planted on purpose.
PLANTED = "planted"

# (folder, what its code must not name, why).
FORBIDDEN_NAMES = [
    ("host/src", r"\bsumac_device\b|\bsumac_firmware\b", "host never names device"),
    ("host/src", r"\bsumac_hal::(\{[^;]*\b)?emu\b", "host never names hal::emu"),
    ("host/src/engine", r"\bcrate::(\{[^;]*\b)?comm\b", "engine never names comm"),
    ("host/src/recovery", r"\bcrate::(\{[^;]*\b)?(comm|engine|exec|controller)\b", "recovery never names what drives it"),
    ("host/src/recovery", r"\b(Mutex|RwLock|Condvar|TcpListener|TcpStream|thread::)\b", "recovery does no I/O and locks nothing"),
    ("device/src", r"\bsumac::|\bsumac_firmware\b", "device never names host"),
    ("device/src", r"\bsumac_hal::(\{[^;]*\b)?emu\b", "device never names hal::emu"),
    ("hal/src/emu", r"\bcrate::(\{[^;]*\b)?wire\b|\bsuper::(super::)?wire\b", "hal::emu knows nothing of wire"),
]

# Crates whose folders must not need each other in a circle.
LAYERED = ["hal", "device", "host", "host/cli", "firmware"]

# (crate, folder) whose files must not need each other in a circle.
LAYERED_FILES = [("host", "comm"), ("host", "engine"), ("host", "recovery")]

# (file, what it must say, why).
REQUIRED = [
    ("firmware/boards/bare/src/lib.rs", r"^#!\[no_std\]", "boards without an operating system have no std"),
    ("firmware/boards/bare/src/lib.rs", r"^#!\[forbid\(unsafe_code\)\]", "what boards share has no unsafe code"),
    ("device/src/lib.rs", r"^#!\[no_std\]", "the device's runtime is no_std"),
    ("device/src/lib.rs", r"^#!\[forbid\(unsafe_code\)\]", "the device's runtime has no unsafe code"),
    ("hal/src/lib.rs", r"^#!\[(no_std|cfg_attr\(not\(.*\), no_std\))\]", "hal is no_std unless asked otherwise"),
]


def usable(expression, more=frozenset()):
    """Tell whether an SPDX licence expression (SPDX 2.3, annex D) can be met within ALLOWED, and `more`.

    >>> usable("MIT"), usable("GPL-3.0-only"), usable("MIT/Apache-2.0")
    (True, False, True)
    >>> usable("GPL-2.0-only OR MIT"), usable("MIT AND GPL-2.0-only")
    (True, False)
    >>> usable("(MIT OR Apache-2.0) AND Unicode-3.0"), usable("MIT OR GPL-2.0-only AND ISC")
    (True, True)
    >>> usable("(MIT OR Apache-2.0) AND OpenSSL"), usable("Apache-2.0 WITH LLVM-exception OR GPL-2.0-only")
    (False, True)
    >>> usable("GPL-2.0-only WITH Classpath-exception-2.0"), usable(""), usable("MIT OR"), usable("MIT ISC")
    (False, False, False, False)
    >>> usable("(MIT OR Apache-2.0) AND NCSA"), usable("(MIT OR Apache-2.0) AND NCSA", {"NCSA"})
    (False, True)
    """
    # A slash is how old manifests wrote OR.
    tokens = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))

    def take():
        return tokens.pop(0) if tokens else ""

    def either():
        met = both()
        while tokens[:1] == ["OR"]:
            take()
            met = both() or met
        return met

    def both():
        met = single()
        while tokens[:1] == ["AND"]:
            take()
            met = single() and met
        return met

    def single():
        token = take()
        if token in ("", ")", "AND", "OR", "WITH"):
            raise ValueError(f"'{token}' is not a licence")
        if token == "(":
            met = either()
            return take() == ")" and met
        if tokens[:1] == ["WITH"]:
            token = f"{token} {take()} {take()}"
        return token in ALLOWED or token in more

    try:
        return either() and not tokens
    except ValueError:
        return False


def metadata(*options, folder=ROOT):
    command = ["cargo", "metadata", "--format-version", "1", *options]
    return json.loads(subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE).stdout)


def others():
    """Return what the workspaces beside the main one are made of: boards, for other targets, and the fuzz targets."""
    manifests = sorted([*(ROOT / "firmware/boards").glob("*/Cargo.toml"), ROOT / FUZZ / "Cargo.toml"])
    own = [path.parent for path in manifests if re.search(r"^\[workspace\]$", path.read_text(), re.MULTILINE)]
    return [metadata("--all-features", "--locked", folder=folder) for folder in own]


def versions(lock):
    """Return the versions of each crate in the text of a lock file.

    >>> versions('[[package]]\\nname = "a"\\nversion = "1.0.0"\\n[[package]]\\nname = "a"\\nversion = "2.0.0"')
    {'a': ['1.0.0', '2.0.0']}
    """
    found = {}
    for package in tomllib.loads(lock)["package"]:
        found.setdefault(package["name"], []).append(package["version"])
    return found


def drift(ours, theirs):
    """Yield where a lock file has versions of crates that the workspace's has, but not those.

    >>> list(drift({"a": ["1.0.0", "2.0.0"]}, {"a": ["1.0.0"], "b": ["3.0.0"]}))
    []
    >>> list(drift({"a": ["1.0.0"]}, {"a": ["1.0.1"]}))
    ['tests/fuzz/Cargo.lock: a 1.0.1, where the workspace has 1.0.0; copy Cargo.lock there and build']
    """
    for name, wanted in sorted(theirs.items()):
        has = ours.get(name, wanted)
        for version in (version for version in wanted if version not in has):
            yield f"{FUZZ}/Cargo.lock: {name} {version}, where the workspace has {', '.join(has)}; copy Cargo.lock there and build"


def members(data):
    ids = set(data["workspace_members"])
    return [package for package in data["packages"] if package["id"] in ids]


def foreign_crates(data, own):
    """Yield what is wrong with crates of others."""
    for package in data["packages"]:
        name = f"{package['name']} {package['version']}"
        licence = package["license"] or ""
        if not usable(licence, EXCEPTIONS.get(package["name"], frozenset())):
            yield f"{name}: licence '{licence or 'not stated'}' is not allowed; replace the crate, or argue for it in deny.toml"
        source = package["source"]
        if source is None and package["name"] not in own:
            yield f"{name}: comes from a path outside the workspace"
        if source is not None and not source.startswith("registry+"):
            yield f"{name}: comes from '{source}'; depend on a release in a registry"


def manifests(packages, own):
    """Yield where a manifest breaks the dependency rule, in any kind of dependency."""
    for package in packages:
        name = package["name"]
        if name not in ARROWS:
            yield f"{name}: a new member; state in ARROWS what it may depend on"
            continue
        allowed = ARROWS[name]
        for dependency in package["dependencies"]:
            to = dependency["name"]
            if to in own and allowed is not ANY and to not in allowed:
                yield f"{name} depends on {to}; it may depend on {', '.join(sorted(allowed)) or 'no member'}"
            bad = FORBIDDEN_FEATURES.get(name, set()) & set(dependency["features"])
            if to == "sumac-hal" and bad:
                yield f"{name} asks for hal's feature '{', '.join(sorted(bad))}', which is not its to name"


def planted(packages):
    """Yield where something could switch planted bugs on without naming them.

    >>> package = {"name": "a", "dependencies": [], "features": {"planted": ["b/planted"], "default": ["c"]}}
    >>> list(planted([package]))
    []
    >>> package["features"]["default"] = ["b/planted"]
    >>> package["dependencies"] = [{"name": "b", "features": ["planted"]}]
    >>> list(planted([package]))
    ["a's feature 'default' plants bugs", 'a asks for b with planted bugs']
    """
    for package in packages:
        name = package["name"]
        for feature, parts in package["features"].items():
            if feature != PLANTED and any(re.split("[/?]+", part)[-1] == PLANTED for part in parts):
                yield f"{name}'s feature '{feature}' plants bugs"
        for dependency in package["dependencies"]:
            if PLANTED in dependency["features"]:
                yield f"{name} asks for {dependency['name']} with planted bugs"


def strip_comments(text):
    """Blank out Rust's line comments, so that documentation may name what code may not.

    >>> strip_comments("a // b\\n//! c\\nd")
    'a \\n\\nd'
    """
    return re.sub(r"//[^\n]*", "", text)


def sources():
    """Yield where a source file breaks the dependency rule or lacks what it must say."""
    for folder, pattern, why in FORBIDDEN_NAMES:
        for path in sorted((ROOT / folder).rglob("*.rs")):
            text = strip_comments(path.read_text(encoding="utf-8"))
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{path.relative_to(ROOT)}:{line}: names '{match.group()}': {why}"
    for file, pattern, why in REQUIRED:
        if not re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE):
            yield f"{file}: does not match '{pattern}': {why}"


def items(tree):
    """Yield the first name of each path in a use tree, which may begin with a brace.

    >>> list(items("{a::{b, c}, d, self}; x")), list(items("a::b; x"))
    (['a', 'd', 'self'], ['a'])
    """
    if not tree.startswith("{"):
        yield re.match(r"\w*", tree).group()
        return
    depth, expected = 0, False
    for token in re.findall(r"[{},]|\w+|::", tree):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth == 0:
            return
        if expected and re.match(r"\w", token):
            yield token
        expected = depth == 1 and token in "{,"


def needs(text, module, folder=""):
    """Yield the names at the root of a crate that the code of a module names, or at the root of one of its folders;
    `module` is the module's path from there.

    >>> sorted(needs("use crate::{a::B, c}; use super::d; fn f() { super::super::e::g() }", ["m", "n"]))
    ['a', 'c', 'e']
    >>> sorted(needs("use crate::a::b::C; use crate::d; use super::e::F; use super::super::g;", ["m"], "a"))
    ['b', 'e']
    """
    for match in re.finditer(r"\b(crate|super(?:::super)*)::(?=[\w{])", text):
        rest = text[match.end():]
        if match[1] != "crate" and len(module) == match[1].count("super"):
            yield from items(rest)
        elif match[1] == "crate" and rest.startswith(f"{folder}::" if folder else ""):
            yield from items(rest[len(folder) + 2 :] if folder else rest)


def circles(edges):
    """Return the nodes of a graph that reach themselves.

    >>> circles({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": set()})
    ['a', 'b']
    """
    def reached(start):
        seen, waiting = set(), [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    return sorted(node for node in edges if node in reached(node))


def folders(crate, folder=""):
    """Return what each folder or file directly below a crate's `src`, or a folder there, needs of the others, by name."""
    src = ROOT / crate / "src" / folder
    tops = {path.stem for path in src.iterdir() if path.is_dir() or path.suffix == ".rs"} - {"lib", "main", "mod", "tests"}
    # What the crate's root re-exports belongs to the folder that it comes from.
    home = {}
    for root in (path for path in (src / "lib.rs", src / "main.rs") if path.exists()):
        for use in re.finditer(r"^(?:pub )?use (\w+)::([^;]*);", strip_comments(root.read_text()), re.MULTILINE):
            home |= {name: use[1] for name in re.findall(r"\w+", use[2]) if use[1] in tops and name[0].isupper()}
    edges = {top: set() for top in tops}
    for path in sorted(src.rglob("*.rs")):
        module = [part for part in path.relative_to(src).with_suffix("").parts if part != "mod"]
        if not module or module[0] not in tops or any(re.fullmatch(r"(\w+_)?tests", part) for part in module):
            continue
        # Unit tests in the file itself stand at its end.
        text = re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", strip_comments(path.read_text(encoding="utf-8")))[0]
        edges[module[0]] |= {home.get(name, name) for name in needs(text, module, folder)} & tops - {module[0]}
    return edges


def layers():
    """Yield which folders of a crate need each other."""
    for crate in LAYERED:
        edges = folders(crate)
        for folder in circles(edges):
            around = ", ".join(sorted(other for other in edges[folder] if folder in edges[other])) or "others between them"
            yield f"{crate}/src/{folder} is in a circle of folders that need each other: {around}; move what both need below"
    for crate, folder in LAYERED_FILES:
        for file in circles(folders(crate, folder)):
            yield f"{crate}/src/{folder}/{file} is in a circle of files that need each other; return values to the upper one"


def print_features():
    for package in sorted(members(metadata("--no-deps")), key=lambda package: package["name"]):
        print(package["name"], "-")
        for feature in sorted(package["features"]):
            if feature != "default":
                print(package["name"], feature)


def main():
    if sys.argv[1:] == ["--features"]:
        print_features()
        return 0
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    data = metadata("--all-features", "--locked")
    packages = members(data)
    own = {package["name"] for package in packages}
    found = [*foreign_crates(data, own), *manifests(packages, own), *planted(packages), *sources(), *layers()]
    images = others()
    for image in images:
        found += foreign_crates(image, own | {package["name"] for package in members(image)})
    found += drift(*(versions((ROOT / folder / "Cargo.lock").read_text(encoding="utf-8")) for folder in ("", FUZZ)))
    every = {(package["name"], package["version"]): package for one in [data, *images] for package in one["packages"]}
    named = {name for name, _ in every}
    found += [f"deny.toml: an exception for {crate}, which nothing depends on" for crate in EXCEPTIONS if crate not in named]
    for violation in found:
        print(violation)
    licences = sorted({package["license"] or "" for package in every.values()})
    print(f"{len(every)} crates, {len(own) + len(images)} of them own; {len(found)} violations; licences:")
    print("  " + "\n  ".join(licences))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

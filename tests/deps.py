#!/usr/bin/env python3
"""Checks the workspace's dependencies: licences, origins, and the direction of dependencies between its own crates.

Licences: every crate that any member can pull in, on any platform, must be usable under a licence that deny.toml
          allows.
Origins:  every foreign crate comes from a registry, not from a git repository or a path.
Crates:   all dependencies between members lead towards hal. `host` never names `device`, `device` never names `host`,
          and neither names `hal::emu`: boards, tests and the command compose them. Inside hal, `emu` never names
          `wire`. MAY_DEPEND_ON is checked against the manifests, FORBIDDEN_NAMES against the sources. Two exceptions,
          each of one file behind a feature (COMPOSERS): `sumac::testing` composes clusters for users' tests, and
          `sumac::transport::local::emulated` the host device of a rank.
Folders:  no folder or file directly below a crate's `src` is part of a dependency cycle (unit tests excepted). The same
          holds for the files of some folders of host, where comm names engine, and engine names recovery, never back.
Locks:    the fuzz targets (tests/fuzz, a separate workspace) use the same versions as the workspace.
Planted:  only features named `planted` enable planted bugs, so no released build contains them.

    tests/deps.py              check; on violations, print each and exit with status 1
    tests/deps.py --features   print "package feature" for each member's features for users, and "package -" for none,
                               but those that other stages of tests/run build alone
"""

import json
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The policy is shared with `cargo deny` (tests/deny/run), which also checks duplicates and RustSec's advisories.
POLICY = tomllib.loads((ROOT / "deny.toml").read_text(encoding="utf-8"))["licenses"]

# Licences allowed for every crate, and additional ones for single crates.
ALLOWED = set(POLICY["allow"])
EXCEPTIONS = {entry["crate"]: set(entry["allow"]) for entry in POLICY["exceptions"]}

# The members that each member may depend on. A new member is an error until it is listed here.
ANY = None
MAY_DEPEND_ON = {
    "sumac-hal": set(),
    "sumac-device": {"sumac-hal"},
    "sumac": {"sumac-hal"},
    "sumac-capi": {"sumac"},
    "sumac-firmware": {"sumac-hal", "sumac-device"},
    "sumac-bare": {"sumac-hal", "sumac-device"},
    "sumac-virtio": set(),
    "sumac-agent": {"sumac-hal", "sumac-firmware"},
    "sumac-cli": ANY,
    "sumac-python": {"sumac"},
    "sumac-tests": ANY,
}

# (member, feature, optional dependency, the one file of the member's that may name it, whether the feature is a default
# one). The feature enables that dependency, without features of its own, and nothing else; no other feature enables
# either.
COMPOSERS = [
    ("sumac", "testing", "sumac-firmware", "host/src/testing.rs", False),
    ("sumac", "host-devices", "sumac-firmware", "host/src/transport/local/emulated.rs", True),
]

# Features of hal that a member must not enable: the emulated hardware, and for the device also std.
FORBIDDEN_FEATURES = {"sumac": {"emu"}, "sumac-device": {"emu", "std", "udp", "verbs"}}

# What stages build alone, by package: with these features, '-' being none.
BUILT_ALONE = {
    "sumac-agent": ["-"],  # agent
    "sumac-bare": ["-", "faults"],  # boards
    "sumac-capi": ["-"],  # capi
    "sumac-python": ["-"],  # python
    "sumac-tests": ["-"],  # none: its programs are always built with the workspace
    "sumac-virtio": ["-"],  # boards
}

# The fuzz targets' workspace.
FUZZ = "tests/fuzz"

# The feature that enables planted bugs.
PLANTED = "planted"

# (folder, pattern that its code must not contain, reason).
FORBIDDEN_NAMES = [
    ("host/src", r"\bsumac_device\b", "host never names device"),
    ("host/src", r"\bsumac_firmware\b", "host never names firmware, which names device"),
    ("host/src", r"\bsumac_hal::(\{[^;]*\b)?emu\b", "host never names hal::emu"),
    ("host/src/engine", r"\bcrate::(\{[^;]*\b)?comm\b", "engine never names comm"),
    ("host/src/recovery", r"\bcrate::(\{[^;]*\b)?(comm|engine|exec|controller)\b", "recovery never names what drives it"),
    ("host/src/recovery", r"\b(Mutex|RwLock|Condvar|TcpListener|TcpStream|thread::)\b", "recovery has no I/O and no locks"),
    ("device/src", r"\bsumac::|\bsumac_firmware\b", "device never names host"),
    ("device/src", r"\bsumac_hal::(\{[^;]*\b)?emu\b", "device never names hal::emu"),
    ("hal/src/emu", r"\bcrate::(\{[^;]*\b)?wire\b|\bsuper::(super::)?wire\b", "hal::emu never names wire"),
]

# Crates whose folders must not form dependency cycles.
LAYERED = ["hal", "device", "host", "host/capi", "host/cli", "firmware"]

# (crate, folder) whose files must not form dependency cycles.
LAYERED_FILES = [("host", "comm"), ("host", "engine"), ("host", "recovery")]

# (file, pattern that it must contain, reason).
REQUIRED = [
    ("firmware/boards/bare/src/lib.rs", r"^#!\[no_std\]", "boards without an operating system have no std"),
    ("firmware/boards/bare/src/lib.rs", r"^#!\[forbid\(unsafe_code\)\]", "what boards share has no unsafe code"),
    ("device/src/lib.rs", r"^#!\[no_std\]", "the device's runtime is no_std"),
    ("device/src/lib.rs", r"^#!\[forbid\(unsafe_code\)\]", "the device's runtime has no unsafe code"),
    ("host/src/lib.rs", r'^#\[cfg\(feature = "testing"\)\]\npub mod testing;', "clusters are for users' tests only"),
    ("hal/src/lib.rs", r"^#!\[(no_std|cfg_attr\(not\(.*\), no_std\))\]", "hal is no_std by default"),
]


def usable(expression, more=frozenset()):
    """Return whether the licences in ALLOWED and `more` satisfy an SPDX expression (SPDX 2.3, annex D).

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
    # Old manifests write OR as a slash.
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


def separate_workspaces():
    """Return the metadata of the other workspaces: boards, which have targets of their own, and the fuzz targets."""
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
    """Yield the crates of which a lock file has a version that differs from the workspace's.

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
    """Yield violations of foreign crates: licences and origins."""
    for package in data["packages"]:
        name = f"{package['name']} {package['version']}"
        licence = package["license"] or ""
        if not usable(licence, EXCEPTIONS.get(package["name"], frozenset())):
            yield f"{name}: licence '{licence or 'not stated'}' is not allowed; replace the crate, or add a justified exception to deny.toml"
        source = package["source"]
        if source is None and package["name"] not in own:
            yield f"{name}: comes from a path outside the workspace"
        if source is not None and not source.startswith("registry+"):
            yield f"{name}: comes from '{source}'; depend on a release in a registry"


def manifests(packages, own):
    """Yield violations of MAY_DEPEND_ON and FORBIDDEN_FEATURES in the manifests, for every kind of dependency."""
    for package in packages:
        name = package["name"]
        if name not in MAY_DEPEND_ON:
            yield f"{name}: a new member; add it to MAY_DEPEND_ON"
            continue
        allowed = MAY_DEPEND_ON[name]
        for dependency in package["dependencies"]:
            to = dependency["name"]
            if to in own and allowed is not ANY and to not in allowed and not composes(package, dependency):
                yield f"{name} depends on {to}; it may depend on {', '.join(sorted(allowed)) or 'no member'}"
            bad = FORBIDDEN_FEATURES.get(name, set()) & set(dependency["features"])
            if to == "sumac-hal" and bad:
                yield f"{name} enables hal's feature '{', '.join(sorted(bad))}', which is forbidden for it"


def composes(package, dependency):
    """Tell whether a dependency is one of COMPOSERS', and only their features enable it.

    >>> composers = {"testing": ["dep:sumac-firmware"], "host-devices": ["dep:sumac-firmware"]}
    >>> package = {"name": "sumac", "features": {**composers, "cuda": ["dep:cudarc"]}}
    >>> dependency = {"name": "sumac-firmware", "optional": True, "kind": None, "features": []}
    >>> dependency["uses_default_features"] = False
    >>> composes(package, dependency), composes(package, dependency | {"optional": False})
    (True, False)
    >>> composes(package, dependency | {"kind": "dev"}), composes(package, dependency | {"name": "sumac-device"})
    (False, False)
    >>> composes(package, dependency | {"uses_default_features": True})
    False
    >>> package["features"]["default"] = ["host-devices"]
    >>> composes(package, dependency)
    True
    >>> package["features"]["cuda"] = ["host-devices"]
    >>> composes(package, dependency)
    False
    >>> del package["features"]["cuda"]
    >>> package["features"]["default"] = ["testing"]
    >>> composes(package, dependency)
    False
    >>> package["features"]["default"] = ["sumac-firmware/verbs"]
    >>> composes(package, dependency)
    False
    >>> package["features"] = {**composers, "testing": ["dep:sumac-firmware", "cuda"]}
    >>> composes(package, dependency)
    False
    """
    name, to, features = package["name"], dependency["name"], package["features"]
    composers = {feature: is_default for member, feature, other, _, is_default in COMPOSERS if (member, other) == (name, to)}
    are_alone = all(features.get(feature) == [f"dep:{to}"] for feature in composers)
    for feature, parts in features.items():
        allowed = {other for other, is_default in composers.items() if is_default and feature == "default"}
        parts = [] if feature in composers else [part for part in parts if part not in allowed]
        are_alone &= not any(
            part in composers or re.split("[/?:]", part.removeprefix("dep:"))[0] == to for part in parts
        )
    has_features = dependency["features"] or dependency["uses_default_features"]
    is_plain = dependency["optional"] and dependency["kind"] is None and not has_features
    return bool(composers) and are_alone and is_plain


def planted(packages):
    """Yield features and dependencies that enable planted bugs implicitly.

    >>> package = {"name": "a", "dependencies": [], "features": {"planted": ["b/planted"], "default": ["c"]}}
    >>> list(planted([package]))
    []
    >>> package["features"]["default"] = ["b/planted"]
    >>> package["dependencies"] = [{"name": "b", "features": ["planted"]}]
    >>> list(planted([package]))
    ["a's feature 'default' enables planted bugs", 'a depends on b with planted bugs']
    """
    for package in packages:
        name = package["name"]
        for feature, parts in package["features"].items():
            if feature != PLANTED and any(re.split("[/?]+", part)[-1] == PLANTED for part in parts):
                yield f"{name}'s feature '{feature}' enables planted bugs"
        for dependency in package["dependencies"]:
            if PLANTED in dependency["features"]:
                yield f"{name} depends on {dependency['name']} with planted bugs"


def strip_comments(text):
    """Remove Rust's line comments: documentation may name what code must not.

    >>> strip_comments("a // b\\n//! c\\nd")
    'a \\n\\nd'
    """
    return re.sub(r"//[^\n]*", "", text)


def sources():
    """Yield violations of FORBIDDEN_NAMES and REQUIRED in the sources."""
    for folder, pattern, why in FORBIDDEN_NAMES:
        for path in sorted((ROOT / folder).rglob("*.rs")):
            text = strip_comments(path.read_text(encoding="utf-8"))
            composed = {to.replace("-", "_") for _, _, to, file, _ in COMPOSERS if ROOT / file == path}
            for match in re.finditer(pattern, text):
                if match.group() in composed:
                    continue
                line = text.count("\n", 0, match.start()) + 1
                yield f"{path.relative_to(ROOT)}:{line}: names '{match.group()}': {why}"
    for file, pattern, why in REQUIRED:
        if not re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE):
            yield f"{file}: does not match '{pattern}': {why}"


def items(tree):
    """Yield the first name of each path in a use tree, which may start with a brace.

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


def root_names(text, module, folder=""):
    """Yield the names at the crate root, or at the root of one of its folders, that the code of a module uses; `module`
    is its path from there.

    >>> sorted(root_names("use crate::{a::B, c}; use super::d; fn f() { super::super::e::g() }", ["m", "n"]))
    ['a', 'c', 'e']
    >>> sorted(root_names("use crate::a::b::C; use crate::d; use super::e::F; use super::super::g;", ["m"], "a"))
    ['b', 'e']
    """
    for match in re.finditer(r"\b(crate|super(?:::super)*)::(?=[\w{])", text):
        rest = text[match.end():]
        if match[1] != "crate" and len(module) == match[1].count("super"):
            yield from items(rest)
        elif match[1] == "crate" and rest.startswith(f"{folder}::" if folder else ""):
            yield from items(rest[len(folder) + 2 :] if folder else rest)


def cyclic(edges):
    """Return the nodes of a graph that are part of a cycle.

    >>> cyclic({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": set()})
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
    """Return {folder or file directly below a crate's `src`, or below a folder of it: the others that it depends on}."""
    src = ROOT / crate / "src" / folder
    tops = {path.stem for path in src.iterdir() if path.is_dir() or path.suffix == ".rs"} - {"lib", "main", "mod", "tests"}
    # Names that the crate's root re-exports belong to the folder that defines them.
    home = {}
    for root in (path for path in (src / "lib.rs", src / "main.rs") if path.exists()):
        for use in re.finditer(r"^(?:pub )?use (\w+)::([^;]*);", strip_comments(root.read_text()), re.MULTILINE):
            home |= {name: use[1] for name in re.findall(r"\w+", use[2]) if use[1] in tops and name[0].isupper()}
    edges = {top: set() for top in tops}
    for path in sorted(src.rglob("*.rs")):
        module = [part for part in path.relative_to(src).with_suffix("").parts if part != "mod"]
        if not module or module[0] not in tops or any(re.fullmatch(r"(\w+_)?tests", part) for part in module):
            continue
        # Without unit tests, which are at the end of the file.
        text = re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", strip_comments(path.read_text(encoding="utf-8")))[0]
        edges[module[0]] |= {home.get(name, name) for name in root_names(text, module, folder)} & tops - {module[0]}
    return edges


def layers():
    """Yield the folders that are part of dependency cycles."""
    for crate in LAYERED:
        edges = folders(crate)
        for folder in cyclic(edges):
            direct = ", ".join(sorted(other for other in edges[folder] if folder in edges[other])) or "indirect"
            yield f"{crate}/src/{folder} is part of a dependency cycle ({direct}); move what both sides need below them"
    for crate, folder in LAYERED_FILES:
        for file in cyclic(folders(crate, folder)):
            yield f"{crate}/src/{folder}/{file} is part of a dependency cycle; return values to the upper file"


def is_forwarded(parts, feature, sources):
    """Tell whether a feature only enables features of dependencies: its package has the same code with and without it.

    >>> is_forwarded(["sumac/verbs"], "verbs", ["fn a() {}"])
    True
    >>> is_forwarded(["sumac/verbs"], "verbs", ['#[cfg(feature = "verbs")]'])
    False
    >>> is_forwarded(["sumac/verbs", "dep:libc"], "verbs", []) or is_forwarded([], "verbs", [])
    False
    """
    only_forwards = bool(parts) and all("/" in part for part in parts)
    return only_forwards and not any(f'feature = "{feature}"' in source for source in sources)


def print_features():
    # Without those that only tests of the workspace enable, together with others.
    for package in sorted(members(metadata("--no-deps")), key=lambda package: package["name"]):
        name, folder = package["name"], pathlib.Path(package["manifest_path"]).parent
        sources = [file.read_text(encoding="utf-8") for file in (folder / "src").rglob("*.rs")]
        # Where it ends, a forwarded feature is checked.
        own = [
            feature
            for feature, parts in sorted(package["features"].items())
            if feature not in ("default", PLANTED, "snapshot") and not is_forwarded(parts, feature, sources)
        ]
        for feature in ["-", *own]:
            if feature not in BUILT_ALONE.get(name, []):
                print(name, feature)


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
    images = separate_workspaces()
    for image in images:
        found += foreign_crates(image, own | {package["name"] for package in members(image)})
    found += drift(*(versions((ROOT / folder / "Cargo.lock").read_text(encoding="utf-8")) for folder in ("", FUZZ)))
    every = {(package["name"], package["version"]): package for one in [data, *images] for package in one["packages"]}
    named = {name for name, _ in every}
    found += [f"deny.toml: exception for {crate}, which is not a dependency" for crate in EXCEPTIONS if crate not in named]
    for violation in found:
        print(violation)
    licences = sorted({package["license"] or "" for package in every.values()})
    print(f"{len(every)} crates, {len(own) + len(images)} of them own; {len(found)} violations; licences:")
    print("  " + "\n  ".join(licences))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

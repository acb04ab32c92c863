#!/usr/bin/env python3
"""Searches the sources for names that the project has replaced by the field's terms, for story-like test names, and for
what the formatter leaves alone: comments that are too wide and files that are too long.

    tests/names.py    print each occurrence; exit status 1 if there is one

Comments may use any ordinary English word, so only identifiers that nothing else explains are listed here. Changelogs
and migration tables name what was replaced and are not searched. EXCEPTIONS lists what stays, with the reason.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Replaced names, as whole words, and the term to use.
REPLACED = {
    r"Desk\w*": "AdmissionRequest, AdmissionReply, Mailbox",
    r"Parley": "a membership channel",
    r"Said|Told|Heard": "Message, Notification, PeerEvent",
    r"Patience": "Backoff, RetryTimer",
    r"Pulse": "Heartbeat",
    r"Remains": "RecoverySource",
    r"is_word\w*": "confirmed, vote",
    r"Seating|Seat": "rank information, attach parameters",
    r"Books": "ResourceLedger",
    r"Greeting": "Handshake",
    r"Stranger": "UnknownPeer",
    r"Breach": "ProtocolViolation",
    r"Situation": "SelectionContext",
    r"Shelf": "visited states",
    r"Double(?:Gpu|Memory|Stream|Event|Graph|Nccl|Pinned)": "Fake...",
    r"Rehearsed|rehearsal": "a test harness",
    r"LOOK_EVERY|NAP": "POLL_INTERVAL, IDLE_POLL",
    r"owe_all": "mark_pending",
    r"Appointment": "MigrationPoint",
    r"Way": "Route, Transport or Algorithm",
}

ANY_REPLACED = re.compile(rf"\b(?:{'|'.join(REPLACED)})\b")

# (path prefix, pattern, reason).
EXCEPTIONS = [
    ("host/src/controller", "Greeting", "a reason to close connections, named like its public limit"),
    ("tests/exhaustive", "Told|Way", "local to the searched machines"),
    ("tests/boards", "Seat|Way", "local to the raw ranks"),
]

# A test's name states subject, condition and result.
TEST_NAME_MAX = 80
COLUMNS_MAX = 120
LINES_MAX = 500
STORY = re.compile(r"^(a|an|the|what|who|whose|nobody|where|whatever|it|there|which|those|that|as|after|before|how)_")


def files():
    command = ["git", "ls-files", "*.rs", "*.py", "*.cu"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return [name for name in listed.stdout.split() if name != "tests/names.py" and (ROOT / name).exists()]


def code(line):
    """Return a line without its comment and string literals.

    >>> code('let a = "Way"; // Way')
    'let a = ; '
    """
    return re.sub(r"//.*", "", re.sub(r'"(?:[^"\\]|\\.)*"', "", line))


def replaced(name, text):
    """Yield replaced names in code, each with its term.

    >>> list(replaced("a.rs", "// Desk\\nlet a = Desktop(NAP);"))
    ['a.rs:2: Desktop; the field says AdmissionRequest, AdmissionReply, Mailbox', 'a.rs:2: NAP; the field says POLL_INTERVAL, IDLE_POLL']
    """
    for number, line in enumerate(text.splitlines(), 1):
        # Few lines have one, and removing comments and literals from a line takes longer than this search.
        if not ANY_REPLACED.search(line):
            continue
        for match in ANY_REPLACED.finditer(code(line)):
            if not any(name.startswith(at) and re.fullmatch(stays, match[0]) for at, stays, _ in EXCEPTIONS):
                term = next(term for pattern, term in REPLACED.items() if re.fullmatch(pattern, match[0]))
                yield f"{name}:{number}: {match[0]}; the field says {term}"


def test_names(name, text):
    """Yield names of tests that are too long or start like a story.

    >>> list(test_names("a.rs", "#[test]\\nfn the_end_comes() {}"))
    ['a.rs: test the_end_comes: name the subject first, then the condition and the result']
    """
    for match in re.finditer(r"#\[test\]\s*(?:#\[[^\]]*\]\s*)*fn (\w+)", text):
        if STORY.match(match[1]):
            yield f"{name}: test {match[1]}: name the subject first, then the condition and the result"
        if len(match[1]) > TEST_NAME_MAX:
            yield f"{name}: test {match[1]}: {len(match[1])} characters; at most {TEST_NAME_MAX}"


def overlong(name, text):
    """Yield comment lines that are too wide, unless of a table, and the length of a file that is too long.

    >>> list(overlong("a.rs", "// | a | table |" + 120 * " " + "\\n// " + 120 * "x"))
    ['a.rs:2: a comment of 123 columns; at most 120']
    """
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        is_prose = re.match(r"\s*//[/!]? ?[^|]*$", line)
        if name.endswith(".rs") and len(line) > COLUMNS_MAX and is_prose:
            yield f"{name}:{number}: a comment of {len(line)} columns; at most {COLUMNS_MAX}"
    if name.endswith(".rs") and len(lines) > LINES_MAX:
        yield f"{name}: {len(lines)} lines; at most {LINES_MAX}"


def main():
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    found = []
    for name in files():
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        found += [*replaced(name, text), *test_names(name, text), *overlong(name, text)]
    print("\n".join(found + [f"{len(found)} found"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

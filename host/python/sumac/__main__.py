"""The command: ``python -m sumac ...`` and the script ``sumac`` replace themselves by the program ``sumac``, which the
wheel contains or which is in PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def is_program(path: Path) -> bool:
    """Return whether this is a program, and no script such as that which calls this module."""
    if not os.access(path, os.X_OK) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2) != b"#!"


def program() -> Path | None:
    """Return the program's path: the wheel's, or else the first one in PATH."""
    places = [Path(__file__).parent / "bin", *map(Path, os.get_exec_path())]
    return next((place / "sumac" for place in places if is_program(place / "sumac")), None)


def main() -> None:
    path = program()
    if path is None:
        print(
            "error: this wheel was built without the program sumac, and PATH has none: build the wheel by "
            "host/python/build, or the program by `cargo build --release -p sumac-cli`",
            file=sys.stderr,
        )
        sys.exit(2)
    os.execv(path, ["sumac", *sys.argv[1:]])


if __name__ == "__main__":
    main()

"""``python -m sumac.torch build`` builds the adapter in C++ for the torch that is there."""

from __future__ import annotations

import argparse
import sys

from . import adapter


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sumac.torch", description="the backend sumac of torch.distributed")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser(
        "build",
        help="build the adapter in C++ for this torch; it needs a compiler of C++20 (variable CXX) and Python's headers, "
        f"and goes into this package's folder, or into {adapter.SETTING}",
    )
    parser.parse_args()
    try:
        print(adapter.build())
    except adapter.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Writes and shows small .npy files with the standard library alone, to try `sumac all-reduce` on.

    npy.py write FILE...   file number i (from 0) holds i * [0, 1, ..., 9] as f32
    npy.py show FILE...    print each file's elements; f32 only
"""

import array
import ast
import sys


def write(path, values):
    header = repr({"descr": "<f4", "fortran_order": False, "shape": (len(values),)})
    # Magic, version and length take 10 bytes; the data begins at a multiple of 64.
    header = header.ljust(-(10 + len(header) + 1) % 64 + len(header)) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
        file.write(array.array("f", values).tobytes())


def read(path):
    with open(path, "rb") as file:
        assert file.read(8) == b"\x93NUMPY\x01\x00", f"{path}: not a .npy file of version 1.0"
        header = ast.literal_eval(file.read(int.from_bytes(file.read(2), "little")).decode())
        assert header["descr"] == "<f4", f"{path}: {header['descr']} elements; this program reads <f4"
        return array.array("f", file.read())


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("write", "show"):
        sys.exit(__doc__)
    for number, path in enumerate(sys.argv[2:]):
        if sys.argv[1] == "write":
            write(path, [float(number * i) for i in range(10)])
        else:
            print(f"{path}:", *(f"{value:g}" for value in read(path)))

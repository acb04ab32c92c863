"""Compares the CPU kernels' narrow floats with NumPy and ml_dtypes, bit by bit.

usage: compare.py PROGRAM, where PROGRAM is the example `reduce` of sumac-hal.

For each of f16, bf16, fp8 E4M3 and E5M2: the round trip of every code through f32 (a reduction of one rank), the
rounding of f32 values (midpoints between codes and their neighbours, powers of two, random bits), and sums, products,
averages, minima and maxima of random codes over several ranks, which NumPy accumulates in f32 in the same order. Any
NaN of the reference must be the canonical NaN of its type.

Exit status: 0 if all bits agree, 1 otherwise.
"""

import subprocess
import sys

import ml_dtypes
import numpy as np

# Name: (NumPy's type, unsigned integer of the same size, canonical NaN).
TYPES = {
    "f16": (np.float16, np.uint16, 0x7E00),
    "bf16": (ml_dtypes.bfloat16, np.uint16, 0x7FC0),
    "f8e4m3": (ml_dtypes.float8_e4m3fn, np.uint8, 0x7F),
    "f8e5m2": (ml_dtypes.float8_e5m2, np.uint8, 0x7E),
}
RANKS = 5
COUNT = 200_000
SEED = 20_240_601


def reduce(program, name, op, contributions, partial=False):
    """Run PROGRAM on the contributions, one array per rank; return the result's bytes."""
    command = [program, name, op, str(len(contributions))] + ["partial"] * partial
    data = b"".join(contribution.tobytes() for contribution in contributions)
    return subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout


def differences(name, found, expected):
    """Return the number of elements that differ, and a description of the first; `expected` has the type `name`."""
    _, bits, nan = TYPES[name]
    found = np.frombuffer(found, bits)
    is_nan = np.isnan(expected.astype(np.float32))
    wrong = found != np.where(is_nan, bits(nan), expected.view(bits))
    first = np.argmax(wrong)
    return int(wrong.sum()), f"element {first}: {found[first]:#x}, expected {expected.view(bits)[first]:#x}"


def boundaries(name):
    """Return the f32 values of all codes, their midpoints, and the neighbours of both."""
    dtype, bits, _ = TYPES[name]
    codes = np.arange(2 ** (8 * bits().itemsize), dtype=np.uint32).astype(bits).view(dtype).astype(np.float64)
    finite = np.sort(codes[np.isfinite(codes)])
    spacing = finite[-1] - finite[-2]
    beyond = [finite[-1] + spacing, -finite[-1] - spacing]
    points = np.unique(np.concatenate([finite, beyond]))
    points = np.concatenate([points, (points[1:] + points[:-1]) / 2]).astype(np.float32)
    down, up = np.nextafter(points, np.float32(-np.inf)), np.nextafter(points, np.float32(np.inf))
    return np.concatenate([points, down, up, [-np.float32(0.0), np.inf, -np.inf, np.nan]]).astype(np.float32)


def random_f32(random, count):
    """Return random bit patterns, and patterns with exponents near 1, which the narrow formats can represent."""
    any_bits = random.integers(0, 2**32, count, dtype=np.uint32)
    exponent = random.integers(127 - 30, 127 + 20, count, dtype=np.uint32) << np.uint32(23)
    near = exponent | (any_bits & np.uint32(0x807FFFFF))
    return np.concatenate([any_bits, near]).view(np.float32)


def codes(random, name):
    """Return random codes, 80 % of them of moderate magnitude."""
    dtype, bits, _ = TYPES[name]
    any_bits = random.integers(0, 2 ** (8 * bits().itemsize), COUNT, dtype=np.uint32).astype(bits).view(dtype)
    moderate = random.normal(scale=4.0, size=COUNT).astype(np.float32).astype(dtype)
    return np.where(random.random(COUNT) < 0.2, any_bits, moderate)


def combine(op, contributions):
    """Accumulate from left to right in f32."""
    wide = [contribution.astype(np.float32) for contribution in contributions]
    total = wide[0]
    for value in wide[1:]:
        if op in ("sum", "avg"):
            total = total + value
        elif op == "prod":
            total = total * value
        else:
            # NumPy's minimum and maximum propagate NaNs like the kernels, but of two zeros return either.
            zeros = (total == 0) & (value == 0)
            sign = np.logical_or if op == "min" else np.logical_and
            negative = sign(np.signbit(total), np.signbit(value))
            pick = np.minimum if op == "min" else np.maximum
            total = np.where(zeros, np.where(negative, np.float32(-0.0), np.float32(0.0)), pick(total, value))
    return total / np.float32(len(wide)) if op == "avg" else total


def main():
    program = sys.argv[1]
    random = np.random.default_rng(SEED)
    failed = 0
    for name, (dtype, bits, _) in TYPES.items():
        every = np.arange(2 ** (8 * bits().itemsize), dtype=np.uint32).astype(bits).view(dtype)
        values = np.concatenate([boundaries(name), random_f32(random, COUNT)])
        inputs = [codes(random, name) for _ in range(RANKS)]
        checks = [
            ("every code", reduce(program, name, "sum", [every]), every),
            ("rounding of f32", reduce(program, name, "sum", [values], partial=True), values.astype(dtype)),
        ]
        for op in ("sum", "prod", "avg", "min", "max"):
            checks.append((op, reduce(program, name, op, inputs), combine(op, inputs).astype(dtype)))
        for check, found, expected in checks:
            wrong, first = differences(name, found, expected)
            print(f"{name:<7} {check:<16} {len(expected):>8} elements, {wrong} differ" + (f": {first}" if wrong else ""))
            failed += wrong > 0
    return 1 if failed else 0


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        sys.exit(main())

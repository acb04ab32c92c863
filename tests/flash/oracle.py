#!/usr/bin/env python3
"""Compares `sumac image` with the Python implementation bfb.py on random files with many images and versions.

    tests/flash/oracle.py SUMAC [--cases N] [--seed N]

Each case draws images of random ids, versions and lengths. These outputs must be identical in every byte: `repack` of
single files, of a stream with some images replaced, and for each card; conversion to the eMMC form and back. The outputs
of `list` and `extract` must match the input. Streams as `mlx-mkbfb --filter` writes them, and a configuration behind the
last image, must verify and be repacked to the canonical form. Finally one signed image is built, and its manifest is verified with
openssl and hashlib. Stops with status 1 at the first difference and prints the seed.
"""

import argparse
import base64
import hashlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import bfb

IDS = {number: name for name, number in bfb.NAMES.items()}
# Edge cases; the id of the manifest is treated like any other and holds random bytes.
LENGTHS = [0, 1, 7, 8, 9, 23, 24, 25, 4095, 4096, 4097]
CARDS = ["bluefield-1", "bluefield-2", "bluefield-3"]


def draw(rng):
    """Return random images."""
    images = {}
    for number in rng.sample(sorted(IDS), rng.randint(1, 8)):
        for version in rng.sample([0, 1, 2, 3], rng.randint(1, 4)):
            length = rng.choice(LENGTHS) if rng.random() < 0.7 else rng.randint(0, 70_000)
            images[number, version] = rng.randbytes(length)
    return images


def name(number, version, rng):
    return IDS[number] if version == 0 and rng.random() < 0.5 else f"{IDS[number]}-v{version}"


class Case:
    def __init__(self, sumac, folder, rng):
        self.sumac, self.folder, self.rng = sumac, folder, rng

    def run(self, *arguments):
        command = [self.sumac, "image", *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 0, f"{command}: status {done.returncode}: {done.stderr.decode()}"
        return done.stdout

    def file(self, suffix, data):
        path = self.folder / suffix
        path.write_bytes(data)
        return path

    def settings(self, images):
        """Return --set for each image, in random order."""
        settings = []
        for number, version in self.rng.sample(sorted(images), len(images)):
            path = self.file(f"in-{number}-{version}", images[number, version])
            settings += ["--set", f"{name(number, version, self.rng)}={path}"]
        return settings

    def repack(self, images, *arguments):
        """Repack, compare with `images`, and return the file."""
        out = self.folder / "out.bfb"
        self.run("repack", *arguments, "-o", out)
        assert out.read_bytes() == bfb.write(images), "repack: another stream"
        return out

    def check(self, number):
        images = draw(self.rng)
        out = self.repack(images, *self.settings(images))
        self.listing(out)
        stream = out.read_bytes()
        self.kept(out, images)
        out.write_bytes(stream)
        if number % 4 == 0:
            self.replaced(images)
        if number % 4 == 1:
            self.configured(images)
        if number % 4 == 2:
            self.partition(out, images)
        if number % 4 == 3:
            self.extracted(out, images)

    def listing(self, path):
        listing = json.loads(self.run("list", path, "--json"))
        found = [
            (image["id"], image["version"], image["next_version"], int(image["following"], 16), image["offset"], image["len_bytes"])
            for image in listing["images"]
        ]
        expected = [(*image[:5], len(image[5])) for image in bfb.read(path.read_bytes())]
        assert found == expected, f"list: {found} is not {expected}"

    def replaced(self, images):
        other = draw(self.rng)
        both = {**images, **other}
        inputs = [self.file("base.bfb", bfb.write(images)), *self.settings(other)]
        self.repack(both, *inputs)
        inputs = [self.file("base.bfb", bfb.write(images)), self.file("over.bfb", bfb.write(other))]
        self.repack(both, *inputs)

    def kept(self, path, images):
        copy = self.file("all.bfb", path.read_bytes())
        for hardware, card in enumerate(CARDS):
            kept = bfb.keep_for(images, hardware)
            if kept:
                self.repack(kept, copy, "--for", card)
                filtered = self.file("filtered.bfb", bfb.write_filtered(images, hardware))
                self.run("verify", filtered)
                self.repack(kept, filtered)

    def configured(self, images):
        tail = self.rng.choice([b"\n", b"X=1\n", b"ubuntu_PASSWORD='x'\n" * 100, self.rng.randbytes(200_000)])
        path = self.file("configured.bfb", bfb.write(images) + tail)
        assert f"{len(tail)} bytes follow".encode() in self.run("verify", path), "verify: the tail is not noted"
        self.repack(images, path)

    def partition(self, path, images):
        if self.rng.random() < 0.1:
            # Several segments, the last one full or nearly full.
            images[62, 0] = self.rng.randbytes(bfb.SEGMENT_MAX + self.rng.choice([-24, -16, 0, 8]))
            path = self.repack(images, *self.settings(images))
        copy, out = self.file("all.bfb", path.read_bytes()), self.folder / "out.emmc"
        self.run("repack", copy, "--format", "emmc", "-o", out)
        assert out.read_bytes() == bfb.emmc(bfb.write(images)), "repack: another eMMC image"
        self.listing_of_partition(out, images)
        self.repack(images, out)

    def listing_of_partition(self, path, images):
        listing = json.loads(self.run("list", path, "--json"))
        assert (listing["form"], len(listing["images"])) == ("emmc", len(images)), f"list: {listing}"

    def extracted(self, path, images):
        folder = self.folder / "extracted"
        self.run("extract", path, "-o", folder)
        found = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
        expected = {f"dump-{IDS[number]}-v{version}": data for (number, version), data in images.items()}
        assert found == expected, "extract: other files"
        for entry in folder.iterdir():
            entry.unlink()

    def signed(self):
        """Build a signed image, and verify its manifest (DSSE) with independent tools."""
        if not shutil.which("openssl"):
            print("SKIPPED: verification of the signature: openssl is not installed")
            return 1 if os.environ.get("CI") == "true" else 0
        key, public, out = (self.folder / name for name in ("key.pem", "pub.pem", "signed.bfb"))
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
        kernel, initramfs = self.file("kernel", bfb.KERNEL_HEADER + self.rng.randbytes(5000)), self.file("initramfs", self.rng.randbytes(77))
        inputs = ["--kernel", kernel, "--initramfs", initramfs, "--image-version", "1.2", "--epoch", 3, "--sign-key", key]
        self.run("build", *inputs, "-o", out)
        self.run("verify", out, "--key", public)
        images = {(number, version): data for number, version, *_, data in bfb.read(out.read_bytes())}
        assert bfb.write(images) == out.read_bytes(), "build: another stream"
        envelope = json.loads(images.pop((bfb.NAMES["info"], 0)))
        body, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
        message = self.file("message", b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(body), body))
        signature = self.file("signature", base64.b64decode(envelope["signatures"][0]["sig"]))
        check = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", message, "-sigfile", signature]
        done = subprocess.run(check, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, f"openssl: {done.stdout.decode()}"
        expected = [
            {"name": f"{IDS[number]}-v{version}", "len_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for (number, version), data in images.items()
        ]
        manifest = json.loads(body)
        assert manifest["images"] == expected, f"manifest: {manifest} is not {expected}"
        assert (manifest["board"], manifest["version"], manifest["epoch"]) == ("bluefield", "1.2", 3), manifest
        print("the manifest's signature and digests: verified with openssl and hashlib")
        return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sumac", help="the command")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # Prefer a RAM disk: the command syncs every output to disk, which takes time and is not what is tested here.
    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        status = Case(args.sumac, pathlib.Path(folder), random.Random(args.seed)).signed()
        for number in range(args.seed, args.seed + args.cases):
            try:
                Case(args.sumac, pathlib.Path(folder), random.Random(number)).check(number)
            except AssertionError as error:
                print(f"seed {number}: {error}\nto repeat: oracle.py {args.sumac} --seed {number} --cases 1")
                return 1
    print(f"{args.cases} random files from seed {args.seed} on: identical")
    return status


if __name__ == "__main__":
    sys.exit(main())

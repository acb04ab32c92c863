"""Reads and writes BlueField boot streams: a second implementation from the format's description, to check the Rust code.

image  := header data pad      header: three little-endian u64      pad: zeros up to a multiple of 8
w0     magic 0x13026642 | major 1 << 32 | minor 2 << 36 | next_img_ver << 44 | cur_img_ver << 48 | 3 << 52 | id << 56
w1     length without padding | CRC-32 (zlib) of data and padding << 32
w2     bit (1 << id) for each id that still appears later in the stream

Simple and entirely in memory; it shares no code or table with the implementation under test.
"""

import struct
import zlib

# Names and ids in the order in which the boot stages read them.
ORDER = """
psc-bl 36, psc-fw 37, bl2r-cert 31, bl2r 30, bl2r-auth-cert 42, bl2-cert 6, bl2 1, sys 29, bl2-auth-cert 43,
ddr-cert 38, ddr_ini 32, snps_images 33, ddr5_snps_images 40, ddr_ate_imem 34, ddr_ate_dmem 35,
bl30-key-cert 8, bl30-cert 12, bl30 2, psc-app 39, psc-certs 53, trusted-key-cert 7,
bl31-key-cert 9, bl31-cert 13, bl31 3, bl32-key-cert 10, bl32-cert 14, bl32 4,
bl33-key-cert 11, bl33-cert 15, bl33 5,
capsule 52, boot-acpi 55, boot-dtb 56, boot-desc 57, boot-path 58, boot-args 59, boot-timeout 60, uefi-tests 61,
nicfw 41, ramdisk 54, dpu-gi 49, cfg-gi 48, info 50, image 62, initramfs 63, upgrade-image 51
"""
NAMES = {name: int(number) for name, number in (entry.split() for entry in ORDER.split(","))}
RANK = {number: rank for rank, number in enumerate(NAMES.values())}
SEGMENT_MAX = 2**20 - 8
# What UEFI on arm64 requires of a kernel: a PE header, at 64 here, with the machine 0xaa64.
KERNEL_HEADER = b"MZ" + bytes(58) + struct.pack("<I", 64) + b"PE\0\0\x64\xaa"


def padded(data):
    return data + bytes(-len(data) % 8)


def header(number, version, data, later):
    """Return an image's header; `later` lists the (id, version) of the images after it."""
    same = [other_version for other, other_version in later if other == number]
    w0 = 0x13026642 | 1 << 32 | 2 << 36 | (same[0] if same else 0) << 44 | version << 48 | 3 << 52 | number << 56
    w1 = len(data) | zlib.crc32(padded(data)) << 32
    w2 = 0
    for other, _ in later:
        w2 |= 1 << other
    return struct.pack("<QQQ", w0, w1, w2)


def write(images):
    """Return the stream of {(id, version): data}."""
    order = sorted(images, key=lambda image: (RANK[image[0]], image[1]))
    parts = []
    for place, (number, version) in enumerate(order):
        data = images[number, version]
        parts.append(header(number, version, data, order[place + 1 :]) + padded(data))
    return b"".join(parts)


def read(stream):
    """Return [(id, version, next version, following, offset, data)], without checking anything."""
    images, at = [], 0
    while at < len(stream):
        w0, w1, w2 = struct.unpack_from("<QQQ", stream, at)
        length = w1 & 0xFFFFFFFF
        data = stream[at + 24 : at + 24 + length]
        images.append((w0 >> 56, w0 >> 48 & 15, w0 >> 44 & 15, w2, at, data))
        at += 24 + len(padded(data))
    return images


def emmc(stream):
    """Return the contents of an eMMC boot partition that holds the stream."""
    parts = [bytes(8)]
    for at in range(0, len(stream), SEGMENT_MAX):
        piece = stream[at : at + SEGMENT_MAX]
        end = at + SEGMENT_MAX >= len(stream)
        parts.append(struct.pack("<Q", end << 63 | 1 << 45 | 0x0408 << 29 | len(piece) + 8 >> 3 & 0x1FFFF) + piece)
    return b"".join(parts)


def keep_for(images, hardware):
    """Return the images for a card of hardware version 0 to 2: of each id the highest version up to that."""
    kept = {}
    for number, version in sorted(images):
        if version <= hardware:
            kept[number] = version
    return {(number, version): images[number, version] for number, version in kept.items()}


def write_filtered(images, hardware):
    """Return the stream that `mlx-mkbfb --filter` writes: its next version is that of any next image."""
    stream = bytearray(write(keep_for(images, hardware)))
    entries = read(stream)
    for (_, _, _, _, at, _), (_, version, *_) in zip(entries, entries[1:]):
        stream[at + 5] = stream[at + 5] & 0xF | version << 4
    return bytes(stream)

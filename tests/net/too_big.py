"""Forges a message of a router: that a packet, which a host has perhaps sent, is longer than a link on its way carries.

    python3 too_big.py HOST PEER PORT MTU    report it to HOST, of a packet from its PORT to PEER

All that it takes is the addresses and a port.
"""

import ipaddress
import socket
import struct
import sys

# Shows the UDP sockets of a host.
LIST = ["cat", "/proc/net/udp", "/proc/net/udp6"]
UDP = 17
# Any: that of the sender is not compared.
PEER_PORT = 7


def ports(listed):
    """Return the ports of a list of UDP sockets.

    >>> ports("  sl  local_address rem_address\\n  1: 0100007F:1F90 00000000:0000 07\\n")
    [8080]
    """
    rows = (line.split() for line in listed.splitlines())
    return [int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[0].endswith(":")]


def checksum(data):
    """Return the checksum of RFC 1071 of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def message(host, peer, port, mtu):
    """Return the message, without the header of IP; its checksum is the system's matter over IPv6."""
    datagram = struct.pack("!4H", port, PEER_PORT, 8, 0)
    if host.version == 6:
        packet = struct.pack("!IHBB", 6 << 28, len(datagram), UDP, 64) + host.packed + peer.packed + datagram
        return struct.pack("!BBHI", 2, 0, 0, mtu) + packet
    fields = 4 << 4 | 5, 0, 20 + len(datagram), 0, 1 << 14, 64, UDP, 0
    header = struct.pack("!BBHHHBBH", *fields) + host.packed + peer.packed
    header = header[:10] + struct.pack("!H", checksum(header)) + header[12:]
    body = struct.pack("!BBHHH", 3, 4, 0, 0, mtu) + header + datagram
    return body[:2] + struct.pack("!H", checksum(body)) + body[4:]


def main():
    host, peer = map(ipaddress.ip_address, sys.argv[1:3])
    port, mtu = map(int, sys.argv[3:])
    family, protocol = {4: (socket.AF_INET, socket.IPPROTO_ICMP), 6: (socket.AF_INET6, socket.IPPROTO_ICMPV6)}[host.version]
    with socket.socket(family, socket.SOCK_RAW, protocol) as raw:
        raw.sendto(message(host, peer, port, mtu), (str(host), 0))


if __name__ == "__main__":
    main()

"""Where this rank can be reached from other nodes: at the address that gloo takes for the job's process group.

Gloo connects every rank to every other one, so where a job trains at all, its ranks reach each other there.
"""

from __future__ import annotations

import os
import socket

import psutil

Address = tuple[int, str]
"""Address family, and an address of this machine."""

_LOOPBACK = (int(socket.AF_INET), "127.0.0.1")


def own_address() -> Address:
    """That of the interface in GLOO_SOCKET_IFNAME, if it is set; else that of the host's name; else the loopback's.

    OSError where there is no such interface."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    found = _of_interface(named) if named else _of_host_name()
    return next((one for one in found if _binds(one)), _LOOPBACK)


def _of_interface(name: str) -> list[Address]:
    families = (socket.AF_INET, socket.AF_INET6)
    there = psutil.net_if_addrs().get(name)
    if there is None:
        raise OSError(f"there is no network interface {name!r}, which GLOO_SOCKET_IFNAME names")
    return [(int(family), one.address) for family in families for one in there if one.family == family]


def _of_host_name() -> list[Address]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(int(family), str(place[0])) for family, _, _, _, place in found]


def _binds(address: Address) -> bool:
    family, host = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True

"""What a node is called, so that ranks can tell whether they are on the same one: whether they see the same memory.

Several nodes in this sense may be containers on one machine, and are lost together."""

from __future__ import annotations

import socket
from pathlib import Path

from store.memory.tier import Tier


def node_name(tier: Tier) -> str:
    """Alike for ranks that share memory, and for no others."""
    return f"{socket.gethostname()} {machine_name()} {tier.folder} {_mount(tier)}"


def machine_name() -> str:
    """Alike for all that is lost when a machine is, and for nothing else; empty where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _mount(tier: Tier) -> str:
    """Tells containers apart that share a machine and a host name, but not their memory."""
    try:
        status = tier.base.stat()
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino}"

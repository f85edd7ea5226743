"""What a node is called, so that ranks can tell whether they are on the same one: whether they see the same memory."""

from __future__ import annotations

import socket
from pathlib import Path

from store.memory.tier import Tier


def node_name(tier: Tier) -> str:
    """Alike for ranks that share memory, and for no others."""
    return f"{socket.gethostname()} {_boot()} {tier.folder} {_mount(tier)}"


def _mount(tier: Tier) -> str:
    """Tells containers apart that share a machine and a host name, but not their memory."""
    try:
        status = tier.base.stat()
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino}"


def _boot() -> str:
    """Tells machines of one host name apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

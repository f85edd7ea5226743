"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path, name: str, ca: Path | None = None) -> tuple[Path, Path]:
    """A certificate for localhost and its key; of itself, or signed by ``ca`` (``ca``.crt and .key)."""
    crt, key = folder / f"{name}.crt", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    words += [] if ca is None else ["-CA", str(ca.with_suffix(".crt")), "-CAkey", str(ca.with_suffix(".key"))]
    done = subprocess.run([*words, "-out", crt, "-keyout", key], capture_output=True, text=True, check=False)
    if "req: Unknown option" in done.stderr or done.returncode:
        pytest.skip(f"openssl cannot make a certificate here, so TLS is NOT tested: {done.stderr[-300:]}")
    return crt, key

"""Azurite, Microsoft's server of blob storage for tests, as a process; its container is made by a signed request.

It is found as ``azurite-blob`` on the PATH, or where ``AZURITE`` says: ``npm install azurite`` brings it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import time
from datetime import UTC, datetime
from types import TracebackType

import pytest

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite, as its manual says."""
CONTAINER = "container"


class Azurite:
    """A context manager. Skips the test without Azurite."""

    def __enter__(self) -> Azurite:
        program = shutil.which(os.environ.get("AZURITE", "azurite-blob"))
        if program is None or shutil.which("node") is None:
            pytest.skip("needs Azurite: npm install azurite, and AZURITE=.../azurite-blob")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [program, "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", f"--blobPort={self.port}"]
        self._process = subprocess.Popen([*command, "--disableTelemetry"], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while True:
            try:
                self._make_container()
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    self._process.kill()
                    raise
                time.sleep(0.1)
            else:
                return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it, besides a URL."""
        endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        named = {"ACCOUNT_NAME": ACCOUNT, "ACCOUNT_KEY": KEY, "ENDPOINT": endpoint}
        return {"AZURE_ALLOW_HTTP": "true", **{f"AZURE_STORAGE_{name}": value for name, value in named.items()}}

    def _make_container(self) -> None:
        headers = {"x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "x-ms-version": "2021-12-02"}
        signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = "PUT" + 12 * "\n" + signed + f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        headers |= {"Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}", "Content-Length": "0"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("PUT", f"/{ACCOUNT}/{CONTAINER}?restype=container", headers=headers)
        status = connection.getresponse().status
        connection.close()
        assert status == 201, status

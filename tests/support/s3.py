"""An S3 server for tests: moto's, in this process, and what is in its buckets without asking it.

It honours ``If-None-Match: *`` on puts. But it looks and puts in two steps, each request in a thread, so puts are made
to take turns here. It keeps no condition on who asks: any keys do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler

KEYS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_ALLOW_HTTP": "true"}
BUCKET = "bucket"


class Server:
    """A context manager; one at a time in a process."""

    def __enter__(self) -> Server:
        self._unlocked, turn = S3Response.put_object, threading.Lock()

        def put_object(response: S3Response) -> Any:
            with turn:
                return self._unlocked(response)

        S3Response.put_object = put_object
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # it logs every request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        WSGIRequestHandler.disable_nagle_algorithm = True  # otherwise bodies wait until headers are acknowledged
        self._server.start()
        self.port: int = self._server.get_host_and_port()[1]
        self._backend: Any = get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"]
        self._backend.reset()
        self._backend.create_bucket(BUCKET, "us-east-1")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
        S3Response.put_object = self._unlocked

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it, besides a URL."""
        return {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def objects(self, prefix: str) -> dict[str, bytes]:
        """All objects below a prefix, by the rest of their keys."""
        keys = self._backend.buckets[BUCKET].keys
        return {key.removeprefix(f"{prefix}/"): keys[key].value for key in list(keys) if key.startswith(f"{prefix}/")}

    def put(self, prefix: str, objects: Mapping[str, bytes]) -> None:
        """Have just these objects below a prefix."""
        keys = self._backend.buckets[BUCKET].keys
        for key in [key for key in list(keys) if key.startswith(f"{prefix}/")]:
            keys.pop(key)
        for name, data in objects.items():
            self._backend.put_object(BUCKET, f"{prefix}/{name}", data)

    def copied(self, prefix: str, folder: Path) -> Path:
        """The objects as files: a store in a bucket is one in a directory, too."""
        for name, data in self.objects(prefix).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder

    def unfinished_uploads(self) -> list[str]:
        """Keys of uploads in parts that were neither completed nor given up."""
        return [upload.key_name for upload in self._backend.buckets[BUCKET].multiparts.values()]


@contextmanager
def tiny_parts() -> Iterator[None]:
    """Parts of any size: the real server wants 5 MiB of each but the last."""
    from moto.s3 import models

    before = models.S3_UPLOAD_PART_MIN_SIZE
    models.S3_UPLOAD_PART_MIN_SIZE = 1
    try:
        yield
    finally:
        models.S3_UPLOAD_PART_MIN_SIZE = before

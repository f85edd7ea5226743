"""A Hugging Face hub in this process: the endpoints that pushing a folder needs, over repositories in a directory.

Files that its client asks about are large (``lfs``) where they are safetensors, else part of the commit."""

from __future__ import annotations

import base64
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

TOKEN = "hf_test"


class Hub:
    """``folder(repo, branch)`` holds what was pushed. commits: (repo, branch, summary) in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private: dict[str, bool] = {}
        self.commits: list[tuple[str, str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

            def answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                known = self.headers.get("Authorization") == f"Bearer {TOKEN}" or path.startswith("/lfs/")
                found = hub.answer(self.command, path, data) if known else None
                body = json.dumps({"error": "unauthorized or unknown"} if found is None else found).encode()
                self.send_response((404 if known else 401) if found is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find it; it is asked by the plain protocol of git LFS."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def folder(self, repo: str, branch: str = "main") -> Path:
        return self.root / repo / branch

    def answer(self, verb: str, path: str, data: bytes) -> Any:
        """The JSON of an endpoint; None if there is none."""
        if path == "/api/whoami-v2":
            return {"type": "user", "name": "me", "orgs": []}
        if path == "/api/validate-yaml":  # of a model card
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(data)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.private.setdefault(name, bool(asked.get("private") or asked.get("visibility") == "private"))
            self.folder(name).mkdir(parents=True, exist_ok=True)
            return {"url": f"{self.endpoint}/{name}", "name": name}
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            (self.root / "lfs").mkdir(exist_ok=True)
            (self.root / "lfs" / found[1]).write_bytes(data)
            return {}
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(data)["objects"]
            actions = {one["oid"]: {"upload": {"href": f"{self.endpoint}/lfs/{one['oid']}"}} for one in objects}
            return {"transfer": "basic", "objects": [{**one, "actions": actions[one["oid"]]} for one in objects]}
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)/([^/]+)", path)
        if found is None or found[1] not in self.private:
            return None
        return getattr(self, f"_{found[2]}")(found[1], found[3], data)

    def _branch(self, repo: str, branch: str, _: bytes) -> Any:
        self.folder(repo, branch).mkdir(exist_ok=True)
        return {}

    def _tree(self, repo: str, branch: str, _: bytes) -> Any:
        names = (path.name for path in self.folder(repo, branch).iterdir())
        return [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]

    def _preupload(self, repo: str, branch: str, data: bytes) -> Any:
        del repo, branch
        mode = {True: "lfs", False: "regular"}
        paths = [one["path"] for one in json.loads(data)["files"]]
        return {"files": [{"path": p, "uploadMode": mode["safetensors" in p], "shouldIgnore": False} for p in paths]}

    def _commit(self, repo: str, branch: str, data: bytes) -> Any:
        for one in map(json.loads, data.splitlines()):
            value, folder = one["value"], self.folder(repo, branch)
            if one["key"] == "header":
                self.commits.append((repo, branch, value["summary"]))
            elif one["key"] == "file":
                assert value["encoding"] == "base64"
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif one["key"] == "lfsFile":
                (folder / value["path"]).write_bytes((self.root / "lfs" / value["oid"]).read_bytes())
            elif one["key"] == "deletedFile":
                (folder / value["path"]).unlink()
        return {"commitUrl": f"{self.endpoint}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}

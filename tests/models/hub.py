"""A model hub on the loopback: the few routes that `snapshot_download` asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A stub of the Hub: its files and its behaviour.

    models: files by model, under the one commit SHA, which `main` and `v1` name. cut: files whose
    transfer ends halfway. gated, closed: models answered with 403 and 401. asked: paths fetched.
    """

    models: dict[str, Mapping[str, bytes]]
    cut: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve it on a free port within."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(path)
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            name, route, revision = "/".join(parts[2:4]), parts[4], parts[5]
        else:
            name, route, revision = "/".join(parts[:2]), parts[2], parts[3]
        if name in self.hub.closed:
            return self._refuse(401, "Invalid credentials", "")
        if name not in self.hub.models:
            return self._refuse(404, "Repository not found", "RepoNotFound")
        if name in self.hub.gated:
            return self._refuse(403, "Access is restricted", "GatedRepo")
        if revision not in ("main", "v1", SHA):
            return self._refuse(404, "Invalid rev id", "RevisionNotFound")
        files = self.hub.models[name]
        if route == "revision":
            siblings = [{"rfilename": each} for each in files]
            return self._json({"id": name, "sha": SHA, "siblings": siblings})
        if route == "tree":
            return self._json(
                [
                    {"type": "file", "path": each, "size": len(data), "oid": _etag(data)}
                    for each, data in files.items()
                ]
            )
        return self._file("/".join(parts[4:]), files)

    def _file(self, name: str, files: Mapping[str, bytes]) -> None:
        if name not in files:
            return self._refuse(404, "Entry not found", "EntryNotFound")
        data, start = files[name], 0
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            end = start + (len(data) - start) // 2 if name in self.hub.cut else len(data)
            self.wfile.write(data[start:end])
            self.close_connection = True
        return None

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, message: str, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Tests read what the command says, not what the hub does."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()

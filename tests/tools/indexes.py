"""A package index on this machine: wheels of what is installed, and empty ones of what is large."""

from __future__ import annotations

import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path


def installed(folder: Path, name: str) -> None:
    """Write the wheel of a pure package that is installed here."""
    found = distribution(name)
    wheel = folder / f"{name}-{found.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in found.files or ():
            if not {"..", "__pycache__"} & set(file.parts):
                archive.write(file.locate(), str(file))


def stand_in(folder: Path, name: str, version: str, code: str = "") -> None:
    """Write a wheel of that name that holds one module and needs nothing."""
    module, of_it = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}.py", code)
        archive.writestr(
            f"{of_it}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{of_it}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{of_it}/RECORD", "")


@contextmanager
def served(folder: Path, cut: str) -> Iterator[str]:
    """The wheels of a folder as an index over HTTP, its address. cut: the file whose download stops
    half-way, as behind a proxy that gives up."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            last = self.path.rstrip("/").rpartition("/")[2]
            files = [f for f in folder.iterdir() if f.name.partition("-")[0].lower() == last]
            if self.path.endswith(".whl"):
                body = (folder / last).read_bytes()
            else:
                body = "".join(map(_link, files)).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            kind = "application/zip" if self.path.endswith(".whl") else "text/html"
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if last == cut else body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _link(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return f'<a href="/files/{file.name}#sha256={digest}">{file.name}</a>\n'

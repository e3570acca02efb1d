"""A small Hugging Face Hub on this machine: repositories from dictionaries, as far as the client asks."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Attributes: repositories ("models/owner/name" → file → content), requests (what was asked), cut (bytes after which one answer
    ends), gated."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.cut: int | None = None
        self.gated: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        start = self.headers.get("Range", "")
        self.server.requests.append(f"{self.command} {path} {start}".strip())
        if path.startswith("/api/"):
            parts = path.removeprefix("/api/").split("/")
            return self._describe("/".join(parts[:3]), parts[3:])
        before, _, after = path[1:].partition("/resolve/")
        kind = before if before.startswith("datasets/") else f"models/{before}"
        files = self.server.repositories.get(kind, {})
        name = after.partition("/")[2]
        if name not in files:
            return self._refuse(404, "EntryNotFound")
        content = files[name]
        tag = hashlib.sha256(content).hexdigest()
        first = int(start.removeprefix("bytes=").rstrip("-")) if start else 0
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - first))
        if start:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            cut, self.server.cut = self.server.cut, None
            self.wfile.write(content[first : len(content) if cut is None else first + cut])
            self.close_connection = cut is not None

    def _describe(self, name: str, rest: list[str]) -> None:
        if name in self.server.gated:
            return self._refuse(403, "GatedRepo")
        if name not in self.server.repositories:
            return self._refuse(404, "RepoNotFound")
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        files = self.server.repositories[name]
        listed = [
            {"type": "file", "path": x, "size": len(y), "oid": hashlib.sha1(y).hexdigest()} for x, y in files.items()
        ]
        if rest[:1] == ["tree"]:
            return self._send(listed)
        self._send(
            {"id": name, "sha": COMMIT, "siblings": [{"rfilename": x, "size": len(y)} for x, y in files.items()]}
        )

    def _refuse(self, status: int, code: str) -> None:
        self._send({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, one in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(name, one)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """The server, until the end of the context."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""A Google Cloud Storage bucket in this process: the emulator, with generations, and with faults on request.

The emulator ignores generation preconditions, which a lease is built on, answers one request at a time, and drops the last
byte of an upload that ends in a carriage return.
"""

import base64
import contextlib
import dataclasses
import functools
import http.server
import io
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler, Router
from gcp_storage_emulator.storage import Storage

BUCKET = "pod"


@dataclasses.dataclass
class Fault:
    """What happens to requests: `match(method, path with query)` chooses them, at most `times`."""

    match: Callable[[str, str], bool]
    status: int = 0  # answer this instead
    after: bool = False  # do what was asked first: only the answer is lost
    seconds: float = 0.0  # wait before
    times: int = 10**9
    seen: int = 0


class Server:
    """The bucket.

    Attributes:
      faults: the faults in force.
      requests: "METHOD path" of each request so far.
    """

    def __init__(self) -> None:
        self.storage = Storage(use_memory_fs=True)
        buckets.create_bucket(BUCKET, self.storage)
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()
        handler = functools.partial(_Handler, self.storage)
        self._http = _Threads(("127.0.0.1", 0), handler)
        self._http.bucket = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """What a process needs to find it; before it imports a storage library."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCE_METADATA_ROOT": "127.0.0.1:1",
            "NO_GCE_CHECK": "true",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # the emulator has no such buckets, nor the gRPC to ask
        }

    def names(self, prefix: str = "") -> list[str]:
        """The objects whose names begin with `prefix`."""
        return sorted(name for name in self.storage.objects.get(BUCKET, {}) if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        return self.storage.get_file(BUCKET, name)

    @contextlib.contextmanager
    def faulty(self, *faults: Fault) -> Iterator[None]:
        self.faults = list(faults)
        try:
            yield
        finally:
            self.faults = []

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                if fault.seen < fault.times and fault.match(method, path):
                    fault.seen += 1
                    return fault
        return None

    def generation(self, bucket: str, name: str) -> str:
        """The generation of an object, "0" if there is none."""
        try:
            return self.storage.get_file_obj(bucket, name)["generation"]
        except NotFound:
            return "0"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Threads(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up waiting is no error of ours."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(RequestHandler):
    generation: str | None = None

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def _answer(self, method: str) -> None:
        server: Server = self.server.bucket  # type: ignore[attr-defined]
        fault = server.fault(method, urllib.parse.unquote(self.path))
        if fault is not None:
            time.sleep(fault.seconds)
            if fault.status and not fault.after:
                return self._refuse(fault.status)
        url = urllib.parse.urlparse(self.path)
        query = urllib.parse.parse_qs(url.query)
        if query.get("uploadType") == ["multipart"]:
            self._encode_content()
        parts = url.path.split("/")
        name = urllib.parse.unquote(parts[parts.index("o") + 1] if parts[-1] != "o" and "o" in parts else "")
        name = query.get("name", [name])[0]
        bucket = parts[parts.index("b") + 1] if "b" in parts else ""
        with server.lock:
            self.generation = server.generation(bucket, name) if name else None
            wanted = query.get("ifGenerationMatch", [self.generation])[0]
            if wanted != self.generation and "upload_id" not in query:
                return self._refuse(412)
            if fault is not None and fault.status:
                self.wfile, answer = _Nowhere(), self.wfile
                Router(self).handle(method)
                self.wfile = answer
                self._headers_buffer: list[bytes] = []
                return self._refuse(fault.status, read=False)
            Router(self).handle(method)
        return None

    def _encode_content(self) -> None:
        """Replaces the content of an upload by its base64: the emulator reads the parts of a message as lines of text."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        boundary = b"--" + str(self.headers.get_boundary()).encode()
        before, metadata, rest = body.split(boundary, 2)
        headers, _, content = rest.partition(b"\n\n")
        content = content.removesuffix(b"\n" + boundary + b"--")
        headers += b"\nContent-Transfer-Encoding: base64\n\n"
        parts = (before, metadata, headers + base64.b64encode(content) + b"\n", b"--")
        body = boundary.join(parts)
        self.rfile = io.BufferedReader(io.BytesIO(body))  # type: ignore[arg-type]
        self.headers.replace_header("Content-Length", str(len(body)))

    def end_headers(self) -> None:
        if self.generation not in (None, "0") and self.command == "GET":
            self.send_header("x-goog-generation", str(self.generation))
        super().end_headers()

    def _refuse(self, status: int, *, read: bool = True) -> None:
        if read:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.generation = None
        body = b'{"error": {"code": %d, "message": "as the test asked"}}' % status
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Nowhere:
    def write(self, content: bytes) -> int:
        return len(content)

    def flush(self) -> None: ...

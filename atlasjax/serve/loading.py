"""The answer of a server while its model is loaded and compiled: that it is not ready."""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from atlasjax.serve.app import Access, error_handlers
from atlasjax.serve.limits import Limits
from atlasjax.serve.protocol import RequestError
from atlasjax.serve.server import HttpServer

_QUIET_SECONDS = 1.0  # what is shorter needs no line


@contextlib.contextmanager
def answering(opened: socket.socket, url: str, access: Access, limits: Limits) -> Iterator[Callable[[str], None]]:
    """Answers requests with status 503 until the end of the context, when another server can take the socket over.

    Gives a function that says what is being done, to clients and on stderr.

    Args:
      opened: from `server.listen`.
      url: for the first line.
      access: who may ask.
      limits: of connections.
    """
    doing = "loading the model"

    def say(line: str) -> None:
        print(f"atlasjax: {line}", file=sys.stderr, flush=True)

    def report(now: str) -> None:
        nonlocal doing
        doing = now
        say(now)

    async def answer(request: Request) -> JSONResponse:
        access.check(request)
        if request.url.path == "/health":
            return JSONResponse({"status": "loading", "doing": doing}, 503)
        raise RequestError(503, f"the server is not ready yet; it is {doing}.", code="loading")

    methods = ["GET", "POST", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", answer, methods=methods)], exception_handlers=error_handlers())
    server = HttpServer(app, limits, lifespan="off", grace_seconds=1)
    thread = threading.Thread(target=server.run, args=([opened.dup()],), name="loading", daemon=True)
    thread.start()
    first = threading.Timer(_QUIET_SECONDS, say, [f"{doing}; {url} answers with status 503 until it is ready."])
    first.daemon = True
    first.start()
    try:
        yield report
    finally:
        first.cancel()
        server.should_exit = True
        thread.join()

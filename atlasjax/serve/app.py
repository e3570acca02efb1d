"""The HTTP interface: OpenAI's completions and chat, models, memories, and health."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hmac
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from atlasjax.generate import Context
from atlasjax.serve import batching, protocol, requests
from atlasjax.serve.chat import Before, Chat, VariableError
from atlasjax.serve.limits import Limits
from atlasjax.serve.memories import InUseError, Memories
from atlasjax.serve.protocol import Parsed, RequestError, Responses

_SWEEP_SECONDS = 60.0  # between deletions of expired memories
_TEMPLATES = 4  # rendered at a time
_EVENT_SECONDS = 0.01  # between two events of a stream, which nobody sees apart
_ANSWER = "answer"  # the note of memories that end with one


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may use the server.

    Attributes:
      token: what clients have to send. None: nothing.
      hosts: names under which the server may be reached. None: all. A page of another site that a browser shows cannot use a server
        on this machine then, even if its own name leads here.
    """

    token: str | None = None
    hosts: frozenset[str] | None = None

    def check(self, request: Request) -> None:
        """Raises RequestError if the request is not for this server, or has not its token."""
        if self.hosts is not None and (request.url.hostname or "") not in self.hosts:
            raise RequestError(421, f"this server is not {request.url.hostname!r:.200}.")
        if self.token is None or request.url.path == "/health":
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            raise RequestError(401, "the token is missing or wrong.", code="invalid_api_key")


@dataclasses.dataclass(frozen=True)
class Service:
    """A model that is served, with all that its endpoints need.

    Attributes:
      worker: serves the requests.
      tokenizer: has `encode`, `decode` and `vocab_size`.
      name: the name of the model.
      chat: the form of conversations.
      memories: of the conversations.
      limits: of a request.
      access: who may use it.
    """

    worker: batching.Worker
    tokenizer: requests.Tokenizes
    name: str
    chat: Chat
    memories: Memories
    limits: Limits = Limits()
    access: Access = Access()


class _GoneError(Exception):
    """The client has closed the connection."""


def make_app(service: Service) -> Starlette:
    """The ASGI application."""
    pages = _Pages(service)

    def route(path: str, function: Callable[[Request], Awaitable[JSONResponse]], *methods: str) -> Route:
        async def guarded(request: Request) -> JSONResponse:
            service.access.check(request)
            return await function(request)

        return Route(path, guarded, methods=methods or ("GET",))

    routes = [
        route("/health", pages.health),
        route("/v1/models", pages.models),
        route("/v1/models/{name:path}", pages.one_model),
        route("/v1/memories", pages.memories),
        route("/v1/memories/{name}", pages.delete_memory, "DELETE"),
        Route("/v1/completions", _Generation(service, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", _Generation(service, chat=True), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=pages.lifespan, exception_handlers=error_handlers())


class _Pages:
    """The endpoints that generate nothing, and what goes on beside all of them."""

    def __init__(self, service: Service):
        self._service = service
        created = int(time.time())
        self._model = {"id": service.name, "object": "model", "created": created, "owned_by": "atlasjax"}

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(_SWEEP_SECONDS)
                with contextlib.suppress(OSError):  # who uses a memory is told
                    await asyncio.to_thread(self._service.memories.sweep)

        task = asyncio.create_task(sweep())
        yield
        task.cancel()

    async def health(self, request: Request) -> JSONResponse:
        batcher, error = self._service.worker.batcher, self._service.worker.error
        said = {
            "status": "ok" if error is None else "failed",
            "active": batcher.num_active,
            "waiting": batcher.num_waiting,
        }
        return JSONResponse(said, 200 if error is None else 503)

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def one_model(self, request: Request) -> JSONResponse:
        name = self._service.name
        if request.path_params["name"] != name:
            raise RequestError(404, f"this server has {name!r} only.", param="model", code="model_not_found")
        return JSONResponse(self._model)

    async def memories(self, request: Request) -> JSONResponse:
        with _memory_errors():
            entries = await asyncio.to_thread(self._service.memories.entries)
        data = [{"id": x.name, "object": "memory", "bytes": x.num_bytes, "last_used": int(x.used)} for x in entries]
        return JSONResponse({"object": "list", "data": data})

    async def delete_memory(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        with _memory_errors():
            found = await asyncio.to_thread(self._service.memories.delete, name)
        if not found:
            raise RequestError(404, f"there is no memory {name!r}.", code="memory_not_found")
        return JSONResponse({"id": name, "object": "memory", "deleted": True})


def error_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[JSONResponse]]]:
    """How an application answers errors, by status or type."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestError)
        return _error(error)

    async def no_route(request: Request, error: Exception) -> JSONResponse:
        status = getattr(error, "status_code", 404)
        return _error(RequestError(status, f"{request.method} {request.url.path} is not served."))

    async def bug(request: Request, error: Exception) -> JSONResponse:
        return _error(RequestError(500, f"unexpected error ({type(error).__name__})."))

    return {RequestError: refused, 404: no_route, 405: no_route, 500: bug}


def _error(error: RequestError) -> JSONResponse:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    headers |= {"retry-after": "1"} if error.status in (409, 429) or error.code == "loading" else {}
    headers |= {"connection": "close"} if error.status == 408 else {}  # the rest of the body is not waited for
    return JSONResponse(error.body, error.status, headers)


async def _body(request: Request, limits: Limits) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of another site's page, which a browser sends without asking, is none
        raise RequestError(415, f"content-type is {kind!r:.200}; it must be 'application/json'.")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.client_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise RequestError(413, f"the body has more than {limits.body_bytes} bytes.")
    except TimeoutError:
        raise RequestError(408, f"the body was not complete after {limits.client_seconds:g} s.") from None
    return bytes(body)


@contextlib.contextmanager
def _memory_errors(param: str = "memory") -> Iterator[None]:
    try:
        yield
    except InUseError as error:
        raise RequestError(409, str(error), param=param, code="memory_in_use") from None
    except ValueError as error:
        raise RequestError(400, str(error), param=param) from None
    except OSError as error:
        raise RequestError(
            500, f"the memory cannot be read or written: {error.strerror or error}.", param=param
        ) from None


class _Generation:
    """The endpoint of one kind of generation, as an ASGI application: a client that goes away is noticed at any time."""

    def __init__(self, service: Service, chat: bool):
        self._service, self._chat = service, chat
        # A template may take its time: in threads of its own it keeps only other chats.
        self._threads = concurrent.futures.ThreadPoolExecutor(_TEMPLATES) if chat else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        service = self._service
        with contextlib.suppress(_GoneError, ClientDisconnect):
            service.access.check(request)
            body = await _body(request, service.limits)
            parsed = protocol.parse(body, chat=self._chat, model=service.name, most_tokens=service.limits.max_tokens)
            gone = asyncio.ensure_future(_gone(receive))
            try:
                with contextlib.ExitStack() as stack:
                    if parsed.memory is not None:
                        with _memory_errors():
                            stack.enter_context(service.memories.use(parsed.memory))
                    await self._answer(parsed, gone, scope, receive, send)
            finally:
                gone.cancel()

    async def _answer(
        self, parsed: Parsed, gone: "asyncio.Future[None]", scope: Scope, receive: Receive, send: Send
    ) -> None:
        service = self._service
        context = await self._context(parsed)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(service.limits.seconds):
                tokens, ignored = await loop.run_in_executor(self._threads, self._tokens, parsed, context)
        except TimeoutError:
            seconds = service.limits.seconds
            raise RequestError(503, f"the text was not put together after {seconds:g} s.", code="timeout") from None
        events: asyncio.Queue[requests.Event] = asyncio.Queue()
        before = len(tokens) + (0 if context is None else int(context.num_tokens[0]))
        most, longest = parsed.max_tokens, service.worker.batcher.longest
        if not parsed.has_max_tokens and longest is not None:
            most = max(1, min(most, longest - before))
        stop = parsed.stop + (service.chat.stop if self._chat else ())
        asked = requests.Request(
            tokens, most, parsed.sampling, parsed.seed, stop, context,
            keep=parsed.memory is not None, seconds=service.limits.seconds,
        )  # fmt: skip

        def on_event(event: requests.Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            ticket = await asyncio.to_thread(service.worker.batcher.submit, asked, on_event)
        except requests.QueueFullError as error:
            raise RequestError(429, str(error), code="queue_full") from None
        except requests.ClosedError as error:
            raise RequestError(503, str(error)) from None
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        responses = Responses(service.name, self._chat, ignored, parsed.stream and parsed.include_usage)
        numbers = lambda done: protocol.usage(len(tokens), len(done.tokens))
        try:
            if parsed.stream:
                await self._stream(parsed, events, responses, numbers, gone, send)
                return
            text = ""
            while isinstance(event := await _next(events, gone), requests.Piece):
                text += event.text
            done = await self._finished(parsed, event)
            await JSONResponse(responses.whole(text, done.reason, numbers(done)))(scope, receive, send)
        finally:
            ticket.cancel()

    async def _stream(
        self, parsed: Parsed, events: "asyncio.Queue[requests.Event]", responses: Responses,
        numbers: Callable[[requests.Done], dict[str, int]], gone: "asyncio.Future[None]", send: Send,
    ) -> None:  # fmt: skip
        async def say(body: dict[str, object] | None, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": protocol.event(body), "more_body": more})

        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if (first := responses.first()) is not None:
            await say(first)
        loop, sent = asyncio.get_running_loop(), -math.inf
        try:
            while isinstance(event := await _next(events, gone), requests.Piece):
                # What comes meanwhile is one event: an event costs server and client more than a token costs the model.
                await asyncio.sleep(sent + _EVENT_SECONDS - loop.time())
                text = event.text
                while not events.empty() and isinstance(event := events.get_nowait(), requests.Piece):
                    text += event.text
                await say(responses.piece(text))
                sent = loop.time()
                if not isinstance(event, requests.Piece):
                    break
            done = await self._finished(parsed, event)
            await say(responses.last(done.reason))
            if parsed.include_usage:
                await say(responses.usage(numbers(done)))
        except RequestError as error:  # too late for a status
            await say(error.body)
        await say(None, more=False)

    async def _finished(self, parsed: Parsed, event: requests.Event) -> requests.Done:
        """The last event, after its context was saved."""
        if isinstance(event, requests.Failed):
            raise RequestError(503, event.message, code="timeout" if event.timed_out else None)
        assert isinstance(event, requests.Done)
        if event.context is not None and parsed.memory is not None:
            note = _note(event.tokens, self._service.worker.batcher.end_tokens) if self._chat else ""
            with _memory_errors():
                context = dataclasses.replace(event.context, note=note)
                await asyncio.to_thread(self._service.memories.save, parsed.memory, context)
        return event

    async def _context(self, parsed: Parsed) -> Context | None:
        """The context that the text goes on from."""
        memories = self._service.memories
        if parsed.memory_from is not None:
            with _memory_errors("memory_from"):
                context = await asyncio.to_thread(memories.load, parsed.memory_from)
            if context is None:
                message = f"there is no memory {parsed.memory_from!r}."
                raise RequestError(404, message, param="memory_from", code="memory_not_found")
            return context
        if parsed.memory is None:
            return None
        with _memory_errors():
            return await asyncio.to_thread(memories.load, parsed.memory)

    def _tokens(self, parsed: Parsed, context: Context | None) -> tuple[np.ndarray, tuple[str, ...]]:
        """The tokens of the text, and the fields of the request that have no effect."""
        service, prompt = self._service, parsed.prompt
        if self._chat:
            note = "" if context is None else context.note
            before: Before = "nothing" if context is None else "answer" if note.startswith(_ANSWER) else "text"
            try:
                tokens = service.chat.tokens(service.tokenizer, prompt, before, parsed.variables)  # type: ignore[arg-type]
                ignored = service.chat.ignored(prompt, parsed.variables)  # type: ignore[arg-type]
            except VariableError as error:
                raise RequestError(400, str(error), param="chat_template_kwargs") from None
            except ValueError as error:
                raise RequestError(400, str(error), param="messages") from None
            # The memory has the token that ended its answer.
            held = len(tokens) > 1 and note == f"{_ANSWER} {tokens[0]}"
            return tokens[1:] if held else tokens, parsed.ignored + ignored
        if isinstance(prompt, str):
            return np.asarray(service.tokenizer.encode(prompt) if prompt else [], np.int32), parsed.ignored
        most = service.tokenizer.vocab_size
        wrong = next((i for i in prompt if isinstance(i, int) and not 0 <= i < most), None)
        if wrong is not None:
            raise RequestError(400, f"prompt has the token {wrong!s:.200}; it must be in [0, {most}).", param="prompt")
        return np.asarray(prompt, np.int32), parsed.ignored


def _note(tokens: Sequence[int], end_tokens: Collection[int]) -> str:
    """The note of a memory that ends with an answer, with the token that ended the answer, if one did."""
    return f"{_ANSWER} {tokens[-1]}" if tokens and tokens[-1] in end_tokens else _ANSWER


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _next(events: "asyncio.Queue[requests.Event]", gone: "asyncio.Future[None]") -> requests.Event:
    """The next event.

    Raises:
      _GoneError: the client has closed the connection.
    """
    waiting = asyncio.ensure_future(events.get())
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not waiting.done():
            waiting.cancel()
    if not waiting.done() or waiting.cancelled() or gone.done():
        raise _GoneError
    return waiting.result()

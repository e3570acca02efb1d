"""The HTTP server, with OpenAI's client over localhost."""

import concurrent.futures
import contextlib
import functools
import http.client
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from flax import nnx

from atlasjax import cli
from atlasjax.cli.options.serve import ServeCommand, checked
from atlasjax.generate import ContextFiles, SamplingConfig, generate
from atlasjax.nn import LanguageModel, MemoryConfig, ModelConfig
from atlasjax.serve import BatchConfig, Batcher, Worker, rendering
from atlasjax.serve.chat import PlainChat, TemplateChat
from atlasjax.serve.limits import Limits
from atlasjax.serve.memories import Memories
from atlasjax.storage import locks
from atlasjax.train import ConfigError
from tests.tiny_model import Ascii

NEEDS = "needs the extra 'serve' (starlette, uvicorn) and OpenAI's client"
openai = pytest.importorskip("openai", reason=NEEDS)
for name in ("starlette", "uvicorn"):
    pytest.importorskip(name, reason=NEEDS)
app, web = (importlib.import_module(f"atlasjax.serve.{name}") for name in ("app", "server"))

pytestmark = pytest.mark.usefixtures("compile_fast")
CONFIG = ModelConfig(
    vocab_size=256, dim=16, num_layers=1, num_heads=2, mlp_dim=32, dtype="float32", mixer="memory",
    memory=MemoryConfig(rule="linear_attention", chunk_size=4), tie_embeddings=False,
)  # fmt: skip
SIZES = BatchConfig(slots=4, queue=60, pieces=(16,))
TOKEN = "a-secret"


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(CONFIG, rngs=nnx.Rngs(0))


@contextlib.contextmanager
def serving(folder: pathlib.Path, config=SIZES, chat=PlainChat(), end_tokens=(), grace_seconds=1.0, **limits):
    """A server in a thread: (address, its batcher)."""
    batcher = Batcher(model(), Ascii(), config, end_tokens=end_tokens)
    memories = Memories(ContextFiles(model()), folder)
    limits = Limits(**{"max_tokens": 2000, "body_bytes": 4000} | limits)
    service = app.Service(
        Worker(batcher), Ascii(), "tiny", chat, memories, limits, app.Access(TOKEN, frozenset({"127.0.0.1"}))
    )
    opened, address = web.listen(web.Address("127.0.0.1", 0))
    ready = threading.Event()
    server = web.Server(service, grace_seconds=grace_seconds, ready=ready.set)
    thread = threading.Thread(target=server.run, args=([opened],))
    thread.start()
    try:
        assert ready.wait(60)
        yield address, batcher
    finally:
        server.should_exit = True
        thread.join()
        assert batcher.num_active == batcher.num_waiting == 0


def client_of(address, **options) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{address.url}/v1", api_key=TOKEN, **{"max_retries": 0, "timeout": 120} | options)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("memories")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return client_of(server[0])


def until(condition, seconds=60.0):
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this never happened"
        time.sleep(0.01)


OPTIONS = {"model": "tiny", "max_tokens": 12, "temperature": 0.9, "seed": 5}


def raw(address, method, path, body=b"", **headers):
    """The status and the body of a response, without a client's help."""
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(
        method, path, body, {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"} | names
    )
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, found


def test_completions_chats_and_memories(server, client):
    tokens = generate(model(), Ascii().encode("the book")[None], 12, config=SamplingConfig(0.9), seed=5)
    text = Ascii().decode(np.asarray(tokens)[0])
    whole = client.completions.create(prompt="the book", **OPTIONS)
    assert (whole.choices[0].text, whole.choices[0].finish_reason, whole.model) == (text, "length", "tiny")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (8, 12, 20)
    parts = list(client.completions.create(
        prompt=list(b"the book"), stream=True, stream_options={"include_usage": True}, stop=text[6:8], **OPTIONS
    ))  # fmt: skip
    assert "".join(part.choices[0].text for part in parts[:-1]) == text[: text.index(text[6:8])]
    assert parts[-2].choices[0].finish_reason == "stop"
    assert parts[-1].usage.prompt_tokens == 8

    # A text in two requests, with a memory between them; and from the same memory again, under another name.
    client.completions.create(**OPTIONS | {"prompt": "the ", "max_tokens": 0}, extra_body={"memory": "a.book"})
    for names in ({"memory": "copy", "memory_from": "a.book"}, {"memory": "a.book"}):
        assert client.completions.create(prompt="book", **OPTIONS, extra_body=names).choices[0].text == text
    kept = client.get("/memories", cast_to=object)["data"]
    assert sorted(x["id"] for x in kept) == ["a.book", "copy"]
    assert client.delete("/memories/copy", cast_to=object)["deleted"]

    # A conversation: each request has the new messages only.
    chat = functools.partial(client.chat.completions.create, **OPTIONS)
    first, second = ({"role": "user", "content": content} for content in ("Who came home?", "When?"))
    answer = chat(messages=[first], extra_body={"memory": "talk"}).choices[0].message
    asked = list(b"User: Who came home?\n\nAssistant:")
    tokens = np.asarray(generate(model(), np.array([asked]), 12, config=SamplingConfig(0.9), seed=5))[0].tolist()
    assert (answer.role, answer.content) == ("assistant", Ascii().decode(tokens))
    asked += [*tokens, *b"\n\nUser: When?\n\nAssistant:"]
    expected = client.completions.create(prompt=asked, **OPTIONS).choices[0].text
    stream = chat(messages=[second], extra_body={"memory": "talk"}, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == expected

    assert [x.id for x in client.models.list()] == ["tiny"]
    with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
        client.with_options(api_key="no").models.list()
    assert raw(server[0], "GET", "/health", authorization="") == (200, {"status": "ok", "active": 0, "waiting": 0})


def test_tokens_that_come_fast_share_an_event(server, client):
    text = lambda part: part.choices[0].text
    ask = functools.partial(client.completions.create, prompt="the book", **(OPTIONS | {"max_tokens": 300}))
    start = time.perf_counter()
    parts = [text(part) for part in ask(stream=True) if text(part)]
    seconds = time.perf_counter() - start
    assert "".join(parts) == text(ask())
    assert len(parts) - 1 <= seconds / app._EVENT_SECONDS


@pytest.mark.parametrize("ended", [False, True])
def test_a_conversation_in_a_memory_is_that_of_its_template(tmp_path, ended):
    """The next message comes after the end of the answer, which the memory has if the model wrote it, and has only once."""
    pytest.importorskip("jinja2", reason=NEEDS)
    text = lambda tokens: Ascii().decode(tokens)
    tokens_of = lambda so_far: np.asarray(
        generate(model(), np.array([so_far]), 12, config=SamplingConfig(0.9), seed=5)
    )[0].tolist()
    start = lambda end: list(f"<user>Who?{end}\n<assistant>".encode())
    end = "~"
    if ended:  # a character that this model writes after a text with it
        end = next(chr(i) for i in range(33, 127) if i in tokens_of(start(chr(i)))[1:])
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{end}\n{{% endfor %}}<assistant>"
    first = tokens_of(start(end))
    if ended:
        first = first[: first.index(ord(end)) + 1]
    whole = [*start(end), *first, *f"{'' if ended else end}\n<user>Why?{end}\n<assistant>".encode()]
    second = tokens_of(whole)
    second = second[: second.index(ord(end))] if ended and ord(end) in second else second
    end_tokens = (ord(end),) if ended else ()
    with serving(tmp_path, chat=TemplateChat(template, {}), end_tokens=end_tokens) as (address, _):
        said = [
            client_of(address).chat.completions.create(
                messages=[{"role": "user", "content": question}], **OPTIONS, extra_body={"memory": "talk"}
            )
            for question in ("Who?", "Why?")
        ]
    assert [one.choices[0].message.content for one in said] == [text(first[:-1] if ended else first), text(second)]
    assert ContextFiles(model()).load(tmp_path / "talk.memory").num_tokens[0] >= len(whole)


def test_bad_requests(server, client):
    create = lambda **fields: client.completions.create(**OPTIONS | {"prompt": "a"} | fields)
    extra = lambda **fields: create(extra_body=fields)
    for call, words, param in [
        (lambda: create(temperature=-1), "temperature is -1; it must be 0", "temperature"),
        *((functools.partial(extra, **{name: 10**400}), f"{name} is an integer of more than 300 digits", name)
          for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        (lambda: create(prompt=[10**400]), r"prompt has the token 1000*; it must be in", "prompt"),
        (lambda: create(top_p=2), "top_p is 2; it must be in", "top_p"),
        (lambda: create(max_tokens=2001), r"max_tokens is 2001; it must be in \[0, 2000\]", "max_tokens"),
        (lambda: create(n=2), "n is 2; this server does not have it", "n"),
        (lambda: extra(n=True), "n is True; this server does not have it", "n"),
        (lambda: create(logprobs=0), "logprobs is 0; this server does not have it", "logprobs"),
        (lambda: extra(stream_options={"foo": 1}), "stream_options is .*'foo'.* include_usage and include_obfuscation only",
         "stream_options"),
        (lambda: extra(stream_options={"include_usage": 1}), "include_usage is 1; it must be true or false",
         "stream_options.include_usage"),
        (lambda: create(stop=[""]), "stop is .* none of them empty", "stop"),
        (lambda: create(seed=2**64), r"seed is 18446744073709551616; it must be in \[-2\^63, 2\^64\)", "seed"),
        (lambda: create(prompt=""), "the prompt is empty", None),
        (lambda: create(prompt=[256]), r"prompt has the token 256; it must be in \[0, 256\)", "prompt"),
        (lambda: create(prompt=["a", "b"]), "it must be one text or one list of token ids", "prompt"),
        (lambda: extra(temprature=1), "Unknown field 'temprature'. Did you mean 'temperature'", "temprature"),
        (lambda: extra(stream="yes"), "stream is 'yes'; it must be true or false", "stream"),
        (lambda: extra(memory="../a"), "memory is '../a'; it must be 1 to 100 letters", "memory"),
        (lambda: client.chat.completions.create(model="tiny", messages=[]), "messages is \\[\\]", "messages"),
        (lambda: client.chat.completions.create(model="tiny", messages=[{"role": "tool", "content": ""}]),
         r"messages\[0\].role is 'tool'", "messages[0].role"),
    ]:  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            call()
        assert caught.value.param == param
    create(
        max_tokens=0,
        n=1,
        presence_penalty=0.0,
        extra_body={"logprobs": False, "stream_options": {"include_usage": None}},
    )
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        create(model="gpt")
    with pytest.raises(openai.NotFoundError, match="there is no memory 'none'"):
        extra(memory_from="none")
    for status, request in {
        400: dict(body=b"{"),
        413: dict(body=b" " * 4001),
        415: dict(body=b"{}", content_type="text/plain"),
        421: dict(body=b"{}", host="elsewhere.example"),
    }.items():
        have, body = raw(server[0], "POST", "/v1/completions", **request)
        assert (have, body["error"]["type"]) == (status, "invalid_request_error")
    have, body = raw(server[0], "POST", "/v1/completions", b'{"\\ud800": 1}')
    assert (have, body["error"]["param"]) == (400, "\\ud800")
    assert raw(server[0], "GET", "/v1/nothing")[0] == 404
    assert raw(server[0], "GET", "/v1/completions")[0] == 405
    assert server[1].num_active == 0


def test_what_has_no_effect_is_said_once(server, client):
    chat = functools.partial(client.chat.completions.create, model="tiny", messages=[{"role": "user", "content": "Hi"}])
    plain = chat(max_tokens=9, temperature=0)
    extras = {"user": "u", "service_tier": "flex", "store": True, "metadata": {"a": "b"}, "tool_choice": "none"}
    same = chat(max_completion_tokens=9, top_p=0, temperature=1.5, seed=-(2**63), **extras)
    assert same.choices == plain.choices  # top_p 0 leaves the most likely token alone
    assert (plain.model_extra, same.model_extra) == ({}, {"ignored": ["metadata", "service_tier", "store", "user"]})
    parts = list(chat(max_tokens=9, temperature=0, stream=True, stream_options={"include_usage": True}, **extras))
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == plain.choices[0].message.content
    assert [part.model_extra.get("ignored") for part in parts] == [
        same.model_extra["ignored"],
        *[None] * (len(parts) - 1),
    ]
    assert parts[-1].usage == plain.usage
    named = chat(messages=[{"role": "user", "content": "Hi", "name": "Ann"}], max_tokens=1, temperature=0)
    assert named.model_extra == {"ignored": ["messages.name"]}
    seeds = [
        client.completions.create(**OPTIONS | {"prompt": "a", "seed": seed}).choices[0].text for seed in (5, -5, 2**40)
    ]
    assert len(set(seeds)) == 3
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(
        openai.BadRequestError, match=r"content\[0\] is of the type 'image_url'; this server reads text only"
    ):
        chat(messages=[picture])
    with pytest.raises(
        openai.BadRequestError, match="the chat template does not read 'enable_thinking'; there is nothing"
    ) as caught:
        chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.slow
def test_fifty_conversations_at_once(server, client):
    """Each has three turns in its own memory; all are as if they had been alone."""

    def talk(i: int) -> list[str]:
        turns = []
        for turn in range(3):
            parts = client.completions.create(
                prompt=f"{i} and {turn}", stream=bool(i % 2), **OPTIONS, extra_body={"memory": f"talk-{i}"}
            )
            texts = [part.choices[0].text for part in parts] if i % 2 else [parts.choices[0].text]
            turns.append("".join(texts))
        return turns

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        talks = list(pool.map(talk, range(50)))
    for i in (0, 7, 49):
        text = b""
        for turn in range(3):
            text += f"{i} and {turn}".encode()
            tokens = np.asarray(generate(model(), np.array([list(text)]), 12, config=SamplingConfig(0.9), seed=5))[0]
            assert talks[i][turn] == Ascii().decode(tokens)
            text += bytes(tokens.tolist())
    assert server[1].num_active == server[1].num_waiting == 0


@pytest.mark.slow
def test_disconnects_conflicts_and_the_queue(tmp_path):
    with serving(tmp_path, BatchConfig(slots=1, queue=1, pieces=(16,)), max_tokens=10**6) as (address, batcher):
        client = client_of(address)
        long = functools.partial(client.completions.create, model="tiny", prompt="a", max_tokens=10**6)
        stream = long(stream=True, extra_body={"memory": "book"})
        next(iter(stream))
        with pytest.raises(openai.ConflictError, match="memory 'book' is in use by another request"):
            long(extra_body={"memory": "book"})
        waiting = long(stream=True)
        until(lambda: batcher.num_waiting == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests are waiting"):
            long()
        waiting.close()
        until(lambda: batcher.num_waiting == 0)  # noticed though nothing was to be sent
        assert batcher.num_active == 1
        stream.close()
        until(lambda: batcher.num_active == 0)
        with pytest.raises(openai.APITimeoutError):
            long(timeout=0.5)
        until(lambda: batcher.num_active == 0)
        # A text that was cut off leaves the memory as it was, and free.
        assert client.get("/memories", cast_to=object)["data"] == []
        assert long(max_tokens=2, extra_body={"memory": "book"}).usage.completion_tokens == 2
    with serving(tmp_path, seconds=1.0, max_tokens=10**6) as (address, _):
        text = client_of(address).completions.create(model="tiny", prompt="a", max_tokens=10**6)
        assert text.choices[0].finish_reason == "length"
        assert 0 < text.usage.completion_tokens < 10**6


def test_requests_left_after_the_grace_time_are_told(tmp_path, caplog):
    found = []
    with serving(tmp_path, grace_seconds=0.3, max_tokens=10**6) as (address, batcher):
        long = functools.partial(client_of(address).completions.create, model="tiny", prompt="a", max_tokens=10**6)

        def fails(call):
            with pytest.raises(openai.APIError) as error:
                call()
            found.append(error)

        stream = long(stream=True)
        next(iter(stream))
        threads = [threading.Thread(target=fails, args=(call,)) for call in (long, lambda: list(stream))]
        for thread in threads:
            thread.start()
        until(lambda: batcher.num_active == 2)
    for thread in threads:
        thread.join(60)
    assert {getattr(error.value, "status_code", None) for error in found} == {503, None}
    assert all("the server was stopped" in str(error.value) for error in found)
    assert "Traceback" not in caplog.text


def test_the_moving_average_is_asked_for(tmp_path, monkeypatch, capsys):
    given = []

    def load(run_dir, step, *, ema, decodes):
        assert decodes  # a model that decodes no tokens cannot be served
        given.append((run_dir, step, ema))
        raise ConfigError("this is enough")

    monkeypatch.setattr("atlasjax.cli.serve.load_run", load)
    (tmp_path / "checkpoints").mkdir()
    for options in ([], ["--ema"], ["--ema", "--step", "3"]):
        assert cli.main(["serve", "--port", "0", "--run-dir", str(tmp_path), *options]) == 2
        assert capsys.readouterr().err == "atlasjax: this is enough\n"
    assert given == [(str(tmp_path), None, False), (str(tmp_path), None, True), (str(tmp_path), 3, True)]


def test_files_that_are_no_token_and_no_folder(tmp_path, monkeypatch, capsys):
    """Said before a model is loaded: there is none."""
    (tmp_path / "file").write_bytes(b"caf\xe9")
    for options, words in [
        (["--token-file", "file"], "token_file is 'file'; it should have one word of ASCII characters."),
        (["--memories", "file"], "memories is 'file', but 'file' is a file; give a folder with --memories."),
        (["--memories", "file/in"], "memories is 'file/in', but 'file' is a file; give a folder with --memories."),
        (["--run-dir", "file"], "there is no run in it"),
    ]:
        options = [str(tmp_path / one) if one.startswith("file") else one for one in options]
        assert cli.main(["serve", "--port", "0", "--run-dir", str(tmp_path), *options]) == 2
        assert words in capsys.readouterr().err.replace(f"{tmp_path}/", "")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", "--port", "0", "--run-dir", "file"]) == 2
    assert "there is no run in it" in capsys.readouterr().err


def test_the_variable_of_the_token(tmp_path, monkeypatch, capsys):
    """It is held to what a file is held to, so that no client is refused later."""
    (tmp_path / "checkpoints").mkdir()
    start = lambda: cli.main(["serve", "--run-dir", str(tmp_path), "--host", "0.0.0.0"])
    for wrong in (" ", "two words", "caf\u00e9"):
        monkeypatch.setenv("ATLASJAX_SERVE_TOKEN", wrong)
        assert start() == 2
        assert capsys.readouterr().err == (
            "atlasjax: ATLASJAX_SERVE_TOKEN is set; it should have one word of ASCII characters.\n"
        )
    monkeypatch.setenv("ATLASJAX_SERVE_TOKEN", f"{TOKEN}\n")
    assert checked(ServeCommand(run_dir=str(tmp_path)))[0] == TOKEN
    monkeypatch.setenv("ATLASJAX_SERVE_TOKEN", "")
    assert start() == 2
    assert "give a token" in capsys.readouterr().err


def test_a_template_that_loops_or_errs_keeps_nobody_from_an_answer(tmp_path, monkeypatch, caplog):
    pytest.importorskip("jinja2", reason=NEEDS)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = (
        "{% if 'loop' in messages[0].content %}" + endless + "{% elif 'zero' in messages[0].content %}"
        "{{ 1 // (messages|length - 1) }}{% endif %}{{ messages[0].content }}{{ ending }}"
    )
    chat = TemplateChat(template, {})
    monkeypatch.setattr(rendering, "SECONDS", 2.0)
    ask = lambda text: {"messages": [{"role": "user", "content": text}], **OPTIONS}
    with serving(tmp_path, chat=chat) as (address, _), concurrent.futures.ThreadPoolExecutor(6) as pool:
        post = lambda text: raw(address, "POST", "/v1/chat/completions", json.dumps(ask(text)).encode())
        looping = [pool.submit(post, "loop") for _ in range(6)]
        until(lambda: not chat._renderers["default"]._idle)
        assert raw(address, "GET", "/health")[0] == 200
        assert client_of(address).completions.create(prompt="a", **OPTIONS).usage.completion_tokens == 12
        for found in looping:
            status, body = found.result()
            assert (status, body["error"]["param"]) == (400, "messages")
            assert body["error"]["message"] == "the chat template refuses the messages: it takes longer than 2 s."
        monkeypatch.setattr(rendering, "SECONDS", 60.0)
        status, body = post("zero")
        assert (status, "ZeroDivisionError: " in body["error"]["message"]) == (400, True)
        status, body = post("hello")
        assert (status, body["usage"]["prompt_tokens"]) == (200, 5)
        said = client_of(address).chat.completions.create(
            **ask("hello"), extra_body={"chat_template_kwargs": {"ending": "!?"}}
        )
        assert said.usage.prompt_tokens == 7
    assert "Traceback" not in caplog.text


def test_another_server_has_the_memories(tmp_path, capsys):
    """Said before a model is loaded: there is none."""
    (tmp_path / "memories").mkdir(mode=0o700)
    (tmp_path / "checkpoints").mkdir()
    with locks.take(tmp_path / "memories/lock"):
        assert cli.main(["serve", "--port", "0", "--run-dir", str(tmp_path)]) == 2
    assert (
        f"memories is '{tmp_path}/memories'; another server uses it (process {os.getpid()} on"
        in capsys.readouterr().err
    )


def test_more_connections_than_files(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert cli.main(["serve", "--port", "0", "--run-dir", str(tmp_path), "--connections", str(10**9)]) == 2
    assert "connections is 1000000000; this process may open" in capsys.readouterr().err


PROGRAM = """
import sys
from atlasjax import cli
from atlasjax.train import TrainConfig
from atlasjax.train.load import LoadedRun
from tests.serve.test_server import CONFIG, Ascii, model

import atlasjax.cli.serve
atlasjax.cli.options.serve.checkpoint_folder = lambda _: None  # there is no run
atlasjax.cli.serve.load_run = lambda *_, **__: LoadedRun(model(), Ascii(), TrainConfig(model=CONFIG), 0, [])
sys.exit(cli.main(["serve", "--port", "0", "--slots", "2", "--pieces", "16", "--max-tokens", "1000000", *sys.argv[1:]]))
"""


@contextlib.contextmanager
def process(folder: pathlib.Path):
    """`atlasjax serve` in another process: (the process, a client)."""
    environment = dict(os.environ, ATLASJAX_SERVE_TOKEN=TOKEN)
    command = [sys.executable, "-c", PROGRAM, "--run-dir", str(folder / "tiny"), "--grace-seconds", "1"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            said = running.stdout.readline()
            assert said.startswith("serving tiny at http://127.0.0.1:"), (said, running.stderr.read())
            yield running, client_of(web.Address("127.0.0.1", int(said.split(":")[2].split("/")[0])))
        finally:
            running.kill()


@pytest.mark.slow
def test_killed_and_restarted(tmp_path):
    """Memories of answered requests outlive SIGKILL and SIGTERM; SIGTERM ends what still runs, and exits with 0."""
    tell = lambda client: client.completions.create(prompt="the book", **OPTIONS, extra_body={"memory": "book"})
    texts = []
    with process(tmp_path) as (running, client):
        texts.append(tell(client).choices[0].text)
        running.kill()
        running.wait(60)
    with process(tmp_path) as (running, client):
        texts.append(tell(client).choices[0].text)
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=10**6, stream=True)
        next(iter(stream))
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        stream.close()
    with process(tmp_path) as (_, client):
        texts.append(tell(client).choices[0].text)
    text = b""
    for said in texts:
        text += b"the book"
        tokens = np.asarray(generate(model(), np.array([list(text)]), 12, config=SamplingConfig(0.9), seed=5))[0]
        assert said == Ascii().decode(tokens)
        text += bytes(tokens.tolist())

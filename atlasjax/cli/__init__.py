"""The command `atlasjax`: train, prepare, evaluate, generate, serve, import, export, tune, info."""

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType

import atlasjax
from atlasjax import trusted
from atlasjax.names import lookup
from atlasjax.train.errors import ConfigError, Interrupted, ProcessDiedError, RunError

# Each command has two modules: its options, and what it does, which is slow to import.
COMMANDS = {
    "train": "train a language model, or continue training one",
    "prepare": "tokenize and shuffle a corpus once, for training",
    "evaluate": "measure a trained model on held-out text, on long-context tasks, or on tasks of lm-eval",
    "generate": "let a trained model continue a text",
    "serve": "serve a trained model over HTTP, in the form of OpenAI's API",
    "import": "make a run of public weights",
    "export": "write the model of a run as public weights",
    "tune": "choose the fastest kernels of a model's memory on this machine's device",
    "info": "sizes and costs of presets, and memory per device on TPUs or GPUs",
}
_MODULES = {"import": "import_weights", "export": "export_weights"}  # the others have the name of their command
_AGAIN = 0.02  # seconds after which a lost signal is sent again
USER_ERROR, RUN_ERROR, BUG, TRY_AGAIN = 2, 1, 70, 75  # the last two as in sysexits.h


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: command-line arguments. None means the arguments of this process.

    Returns:
      The exit code: 0; 1 if a run failed; 2 if the request is invalid; 70 for an unexpected error; 75 if another process of the run
      ended (restart all of them to resume); 128 + n after signal n.
    """
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal's encoding lacks
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    before = _interrupt_on(signal.SIGTERM)
    unraisable = sys.unraisablehook
    sys.unraisablehook = functools.partial(_sent_again, unraisable)
    try:
        with trusted.scope():
            code = _command(given, alone=arguments is None)
        try:
            sys.stdout.flush()
        except OSError:
            if code == 0:
                raise
            _drop_output()  # the code already says why the command ended
        return code if code == 0 else _leave(code)
    except BrokenPipeError:  # the reader of a pipe has closed it, as `| head` does
        _drop_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        return _leave(_fail(f"stopped by signal {number}.", 128 + number))
    except Exception as error:  # last resort for unexpected errors
        if debug:
            raise
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
        return _leave(_fail(f"{said} (unexpected error; --debug shows the traceback)", BUG))
    finally:
        sys.unraisablehook = unraisable
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _drop_output() -> None:
    """Discards what could not be printed; otherwise the interpreter fails at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt_on(number: signal.Signals) -> Callable[[int, FrameType | None], object] | int | None:
    """Makes a signal raise KeyboardInterrupt(number). Returns the previous handler, or None outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    return signal.signal(number, interrupt)


def _sent_again(hook: Callable[["sys.UnraisableHookArgs"], object], lost: "sys.UnraisableHookArgs") -> None:
    """Sends a signal again whose exception Python has dropped: it came in a callback, such as jax's of garbage collection."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        number = next(iter(lost.exc_value.args), signal.SIGINT)
    elif isinstance(lost.exc_value, Interrupted):
        number = lost.exc_value.signal
    else:
        hook(lost)
        return
    # Later, when the callback has ended. In the main thread, whose system calls it then interrupts.
    again = threading.Timer(_AGAIN, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    again.start()


def _leave(code: int) -> int:
    """Returns the exit code. With several processes, exits immediately, because the processes would wait for each other."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _command(arguments: list[str], *, alone: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"atlasjax {atlasjax.__version__}")
        return 0
    try:
        lookup("command", arguments[0], COMMANDS)
    except ValueError as error:
        return _fail(str(error), USER_ERROR)
    return _run(arguments[0], arguments[1:], alone=alone)


def _run(command: str, arguments: list[str], *, alone: bool) -> int:
    """Runs a command; `alone`: it is all that this process does."""
    name = _MODULES.get(command, command)
    try:
        request = _imported(f"atlasjax.cli.options.{name}").read(arguments)
        does = _imported(f"atlasjax.cli.{name}")
        if alone:
            gc.freeze()  # no module will be garbage: tracing a model takes a fifth less time
        does.run(request)
    except BrokenPipeError:
        raise
    except ConfigError as error:
        return _fail(str(error), USER_ERROR)
    except Interrupted as error:
        return _fail(str(error), 128 + error.signal)
    except ProcessDiedError as error:
        return _fail(str(error), TRY_AGAIN)
    except RunError as error:
        return _fail(str(error), RUN_ERROR)
    except MemoryError as error:
        return _fail(f"out of memory: {error}", RUN_ERROR)
    except OSError as error:  # a file cannot be read or written; the message names it
        return _fail(str(error), RUN_ERROR)
    except SystemExit as exit_:  # from tyro, after printing help or for invalid arguments
        return exit_.code if isinstance(exit_.code, int) else USER_ERROR
    return 0


def _imported(name: str) -> ModuleType:
    """A module, imported without a search for garbage: there is none, and the search takes an eighth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # the terminal is gone; the exit code remains
        print(f"atlasjax: {message}", file=sys.stderr, flush=True)
    return code


def _help() -> str:
    lines = [f"  atlasjax {name:<10}{what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "Sequence models that learn at test time, in JAX.",
            "",
            *lines,
            "",
            "`atlasjax train` alone trains a small Atlas model on text that comes with Python, in a few minutes on a CPU.",
            "`atlasjax COMMAND --help` lists the options of a command; --debug shows the traceback of an unexpected error.",
        ]
    )

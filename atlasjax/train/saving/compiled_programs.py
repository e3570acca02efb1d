"""Keeps compiled programs on the storage of a run, so that a job that is started again does not compile its step again.

JAX's own persistent compilation cache works in a temporary folder of each process. It is filled from the run's folder at the start,
and process 0 copies back what is new. In between, JAX sees only a local disk: a bucket that does not answer, a file that was cut
off or two processes at one file cannot disturb it.

A program is machine code, and whoever can write to the folder can change it. So it is used only where the user has asked for it in
this job: never by default, and not because a run's config says so (`runs.run_config`).
"""

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import pathlib
import platform
import shutil
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from atlasjax import storage
from atlasjax.train.config import TrainConfig, run_folder

_SUFFIX = "-cache"  # of JAX's entries
_SUM = hashlib.sha256().digest_size
_WORKERS = 8  # files read at the same time

Say = Callable[[str], None]


class CompiledPrograms:
    """The compiled programs of a run, from `kept`.

    Args:
      folder: where they are kept: a folder of the run's folder for these machines (`environment`).
      local: JAX's cache.
      say: prints a line.
    """

    def __init__(self, folder: storage.AnyPath, local: pathlib.Path, say: Say):
        self._folder, self._local, self._say = folder, local, say
        self._known: set[str] = set()
        self._threads = concurrent.futures.ThreadPoolExecutor(1)
        self._writing: concurrent.futures.Future[None] | None = None

    def load(self) -> None:
        """Copies the programs of the run to JAX's cache, in all processes or in none. Damaged ones are left out."""
        loaded: dict[str, bytes] = {}
        try:
            if self._folder.is_dir():
                files = [file for file in self._folder.iterdir() if file.name.endswith(_SUFFIX)]
                with concurrent.futures.ThreadPoolExecutor(_WORKERS) as threads:
                    read = zip(files, threads.map(lambda file: file.read_bytes(), files))
                    loaded = {file.name: content[_SUM:] for file, content in read if _is_whole(content)}
                if damaged := len(files) - len(loaded):
                    self._say(
                        f"{damaged} of {len(files)} programs in {self._folder} are damaged; compiling them again."
                    )
        except OSError as error:
            self._say(f"The compiled programs of the run cannot be read ({_line(error)}); compiling them again.")
            loaded = {}
        if _all_have(loaded):
            for name, content in loaded.items():
                (self._local / name).write_bytes(content)  # a folder of this process
            self._known = set(loaded)

    def save(self) -> None:
        """Begins to copy what was compiled since the last call. Does nothing while that is in progress, or in other processes."""
        if jax.process_index() or (self._writing is not None and not self._writing.done()):
            return
        new = {file.name for file in self._local.iterdir() if file.name.endswith(_SUFFIX)} - self._known
        if new:
            first = not self._known
            self._known |= new
            self._writing = self._threads.submit(self._write, sorted(new), first)

    def close(self) -> None:
        """Copies the rest, and waits for it."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
        self.save()
        self._threads.shutdown()

    def _write(self, names: list[str], first: bool) -> None:
        try:
            if first:
                self._remove_others()
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                content = (self._local / name).read_bytes()
                storage.write_whole(self._folder / name, hashlib.sha256(content).digest() + content)
        except OSError as error:
            self._say(f"The compiled programs cannot be kept ({_line(error)}); the next start compiles them again.")

    def _remove_others(self) -> None:
        """Deletes the programs of other versions and machines, which would only add up."""
        folder = self._folder.parent
        others: list[storage.AnyPath] = list(folder.iterdir()) if folder.is_dir() else []
        for other in others:
            if other.name == self._folder.name:
                continue
            if isinstance(other, storage.StorePath):
                other.rmtree()
            else:
                shutil.rmtree(other, ignore_errors=True)


@contextlib.contextmanager
def kept(config: TrainConfig, say: Say) -> Iterator[CompiledPrograms | None]:
    """The compiled programs of a run, with JAX's cache in use; None, and nothing is changed, without `config.compilation_cache`.

    All processes must enter it. No error of the storage is raised: programs that cannot be read or kept are compiled again.

    Args:
      config: the run.
      say: prints a line.
    """
    if not config.compilation_cache:
        yield None
        return
    # JAX makes the paths of XLA's own caches part of an entry's name. With a temporary path no entry would ever be found again.
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
    before = {name: jax.config.values[name] for name in names}
    with storage.temporary_folder("compiled") as local:
        programs = CompiledPrograms(run_folder(config.run_dir) / "compiled" / environment(), local, say)
        programs.load()
        _configure({"jax_compilation_cache_dir": str(local), "jax_persistent_cache_enable_xla_caches": "none"})
        try:
            yield programs
        finally:
            programs.close()
            _configure(before)


def environment() -> str:
    """A name for the versions and the machines that a compiled program is for. JAX's key leaves out the features of a CPU."""
    device = jax.devices()[0]
    facts: list[str] = [jax.__version__, importlib.metadata.version("jaxlib"), device.client.platform_version]
    facts += [device.device_kind, platform.machine()]
    cpu = pathlib.Path("/proc/cpuinfo")
    if device.platform == "cpu" and cpu.exists():
        facts += [line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))][:1]
    return f"{device.platform}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def _configure(values: dict[str, object]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()  # it would go on with the folder that it began with


def _all_have(loaded: dict[str, bytes]) -> bool:
    """Whether all processes read the same programs. If one had to compile what others have, they could wait for each other."""
    if jax.process_count() == 1:
        return True
    from jax.experimental import multihost_utils

    sums = [(name, hashlib.sha256(content).hexdigest()) for name, content in sorted(loaded.items())]
    own = np.frombuffer(hashlib.sha256(repr(sums).encode()).digest(), np.uint8)
    return bool((multihost_utils.process_allgather(own) == own).all())


def _is_whole(content: bytes) -> bool:
    return hashlib.sha256(content[_SUM:]).digest() == content[:_SUM]


def _line(error: OSError) -> str:
    return " ".join(str(error).split()).rstrip(".")

"""Test session set-up: eight simulated CPU devices, a quiet libtpu, a compilation cache shared by runs, workers and clones."""

import contextlib
import ctypes
import gc
import importlib.metadata
import itertools
import os
import pathlib
import time

import pytest

from atlasjax import cache
from atlasjax.plan import libtpu
from tests.tiers import pytest_choose_tiers  # noqa: F401  pytest finds it here

# Outside the clone: a fresh clone's tests then compile only what changed since the last run on this machine. jax's key of a program
# contains everything that it is compiled from. $JAX_COMPILATION_CACHE_DIR chooses another folder.
_PROGRAMS = cache.folder() / "tests"
_KEPT_SECONDS = 14 * 24 * 3600  # about 150 MB a version of the library

# Must be set before anything imports jax. libtpu is used as a compiler here.
_ENVIRONMENT = {
    **libtpu.environment(),
    "JAX_COMPILATION_CACHE_DIR": str(_PROGRAMS),
    "ATLASJAX_CACHE": str(pathlib.Path(__file__).parent.parent / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # nobody reads in which line an operation of a test was traced
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # read by the workers when they start: fewer page faults
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# Compiling is what these tests spend their time on, not running: LLVM's optimizations are switched off.
_XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_prefer_vector_width": "128",  # less to compile, and these arrays are small
    "--xla_cpu_parallel_codegen_split_count": "1",  # the workers share the cores already
}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # an unknown flag ends the process
    _XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"  # they take two thirds of a compilation
for _name, _value in _XLA_FLAGS.items():
    if _name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_name}={_value}".strip()

# Tracing makes millions of small objects that live on: the collector looks at them less often.
gc.set_threshold(200_000, 20, 50)

_MAPPINGS = pathlib.Path("/proc/self/maps")
_MOST_MAPPINGS = 20_000
_MOST_BYTES = 2.5 * 2**30  # of a worker, of which a machine may have as many as cores
_EVERY = 10  # tests between two looks

_tests_run = itertools.count(1)


def run_together(nodeid: str) -> str:
    """The name of the group of tests that one worker runs, one after another, for what they share is then made once.

    A file's tests share fixtures and compiled functions; in `_BY_NAME` those of one model or rule do. In `_ALONE` a test shares
    nothing with another.
    """
    file, _, rest = nodeid.partition("::")
    if file.endswith(_BY_NAME):
        return f"{file}[{rest.rpartition('[')[2]}" if rest.endswith("]") else nodeid
    return nodeid if file.startswith(_ALONE) else file


_BY_NAME = ("tests/test_models.py", "tests/memory/test_engine.py")
_ALONE = ("tests/memory/", "tests/pallas_kernels/")
# Half a minute and more each: a worker that begins one of them last keeps all others waiting.
_LONG = (
    "tests/pallas_kernels/test_compile.py",
    "tests/distributed/test_processes.py",
    "tests/train/test_kernel_step.py",
    "tests/storage/test_runs.py",
    "tests/train/test_resume.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The longest groups first and the shortest last, so that all workers end at once."""
    items.sort(key=lambda item: (not item.nodeid.startswith(_LONG), item.nodeid.startswith(_ALONE)))


def pytest_sessionstart(session):
    """Deletes old compiled programs, in one process."""
    if hasattr(session.config, "workerinput") or not _PROGRAMS.is_dir():
        return
    oldest = time.time() - _KEPT_SECONDS
    for program in _PROGRAMS.iterdir():
        with contextlib.suppress(OSError):  # another session deletes too
            if program.stat().st_mtime < oldest:
                program.unlink()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Groups by a test's id: those of `xdist_group` fall apart, silently, with pytest 9.2 and pytest-xdist 3.8."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return run_together(nodeid)

    return Scheduling(config, log)


def _too_large() -> bool:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") > _MOST_BYTES or _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS


@pytest.fixture(autouse=True)
def _free_compiled_programs():
    """Frees compiled programs before a worker is too large: each takes some ten memory mappings, and Linux allows 65,530."""
    yield
    if next(_tests_run) % _EVERY or not _MAPPINGS.exists() or not _too_large():
        return
    import jax

    jax.clear_caches()
    gc.unfreeze()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # gives what was freed back to the machine


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new():
    """What other modules left is not looked at again: `Checkpoints` collects after every load, which took half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def compile_fast():
    """For modules whose time is nearly all compilation of tiny models: `pytestmark = pytest.mark.usefixtures("compile_fast")`."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def compiled():
    """The programs compiled so far."""
    import jax

    events = []
    count = lambda event, seconds, **_: events.append(event) if event.endswith("backend_compile_duration") else None
    jax.monitoring.register_event_duration_secs_listener(count)
    yield events
    jax.monitoring.unregister_event_duration_listener(count)


@pytest.fixture
def registered_rules():
    """A test or a page may register a rule of its own: the tables are as before when it ends."""
    from atlasjax import rules  # not at the top: tests without jax's arrays start sooner

    before = [(table, dict(table)) for table in (rules.REGISTRY, rules.WRITES)]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)

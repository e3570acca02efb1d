"""Damage to the cache of compiled programs: what a run keeps (`train/saving/compiled_programs.py`), and jax's own cache beneath it.

A damaged program may never be run: the run compiles again, says so where it is its own cache, and its parameters stay the same.
"""

import contextlib
import io
import pathlib
import random
import tempfile
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from atlasjax.train import train
from experiments.faults import damage, small
from experiments.faults.run import Case, case, some


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Each kind of damage to the programs of a run, and of another version or machine."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place, _no_other_cache():
        folder = pathlib.Path(place)
        whole = train_quietly(folder, folder / "whole", 4)[0]
        small.trained(folder, folder / "stopped", 2, compilation_cache=True)
        kinds = [(kind.__name__, kind, one) for kind in damage.FILE for one in (True, False)]
        others = ("folder of another machine", "a file for the folder", "a stranger's file")
        for name, kind, one in some([*kinds, *((name, None, True) for name in others)], most, rng):
            which = "one program" if one else "all programs"
            yield case(f"{which}, {name}", _gone_on, folder, whole, name, kind, one, random.Random(rng.random()))


@contextlib.contextmanager
def _no_other_cache() -> Iterator[None]:
    """The attack's own cache (`run._share_compilations`) would hide the damage."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def train_quietly(folder: pathlib.Path, run_dir: pathlib.Path, steps: int) -> tuple[object, str]:
    """The parameters after a run that keeps its programs, and what it said. Nothing compiled before is used."""
    said = io.StringIO()
    jax.clear_caches()
    with contextlib.redirect_stdout(said):
        result = train(small.config(folder, run_dir, steps, compilation_cache=True))
    return jax.device_get(result.state.params), said.getvalue()


def _gone_on(
    folder: pathlib.Path, whole: object, name: str, kind: damage.Damage | None, one: bool, rng: random.Random
) -> str:
    copy = damage.copied(folder / "stopped", folder / "copy")
    (compiled,) = (copy / "compiled").iterdir()
    files = sorted(compiled.iterdir())
    if kind is not None:
        for file in [rng.choice(files)] if one else files:
            kind(file, rng)
    elif name == "folder of another machine":
        compiled.rename(compiled.with_name("cpu-0123456789abcdef"))
    elif name == "a file for the folder":
        damage.copied(compiled, copy / "elsewhere")
        for file in files:
            file.unlink()
        compiled.rmdir()
        compiled.write_text("x")
    else:
        (compiled / "jit_stranger-0-cache").write_bytes(rng.randbytes(200))
    found, said = train_quietly(folder, copy, 4)
    return "right" if small.same(found, whole) and "Traceback" not in said else "wrong"

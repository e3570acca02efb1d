"""Banks: the matrices P_m and K_m of all blocks of a context, computed in float64, stored as float32 and cached on disk.

Block m of L tokens advances the coefficients from m L to (m+1) L tokens, with P_m = (m/(m+1))^A and P_0 = 0. A bank for a longer
context starts with the same blocks. So each cache file holds a few consecutive blocks, and a longer context only adds files.
"""

import functools
import os
import pathlib
import warnings
from collections.abc import Callable
from numbers import Integral
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from atlasjax import cache, check, storage
from atlasjax.machine import check_fits, machine_memory
from atlasjax.mixers.elastic.hippo import DISCRETIZATIONS, amplification, build, build_bytes
from atlasjax.names import lookup

_FORMAT = 1  # version of the file format; changing it invalidates all older files
_NUMBERS_OF_A_FILE, _BLOCKS_OF_A_FILE = 2**22, 64

Progress = Callable[[str], None]


class Bank(NamedTuple):
    """P_m and K_m of the first blocks: float32 [blocks, order, order] and [blocks, order, block_size]."""

    transitions: Float[np.ndarray, "blocks order order"]
    kernels: Float[np.ndarray, "blocks order block_size"]


def bank_bytes(order: int, block_size: int, blocks: int) -> int:
    """Bytes of a bank in memory, and approximately on disk."""
    return 4 * blocks * order * (order + block_size)


def load(
    order: int,
    block_size: int,
    blocks: int,
    *,
    discretization: str = "zoh",
    legacy_hippo: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Bank:
    """The bank of the first `blocks` blocks. Blocks that are not in the cache are built and added to it.

    Building takes order³ operations per block: milliseconds at order 540, and half a minute on two cores at order 8,640, where the
    float64 arrays of one block take 2.0 GB (`hippo.build_bytes`). The bank takes 4 · order · (order + block_size) bytes per block.

    Args:
      order: N ≥ 1.
      block_size: L ≥ 1 tokens.
      blocks: number of blocks, ≥ 0. A context of T tokens needs ⌈T/L⌉ − 1.
      discretization, legacy_hippo: see `hippo.transition`.
      cache_dir: cache folder; None means `cache.folder()`. A file that cannot be read is rebuilt. If the folder cannot be
        written, a warning is issued and the blocks are built again next time.
      progress: called with one line of text before each block is built.

    Returns:
      The bank. Calls with the same arguments share the same read-only arrays.

    Raises:
      ValueError: an argument is out of range, or the bank does not fit in the machine's memory.

    Warns:
      RuntimeWarning: the discretization is unstable in one of the blocks. The first one is named. See `hippo.transition`.
    """
    check.integer("hippo", "order", order, 1, kinds=Integral)
    check.integer("hippo", "block_size", block_size, 1, kinds=Integral)
    check.integer("hippo", "blocks", blocks, 0, kinds=Integral)
    lookup("discretization", discretization, DISCRETIZATIONS)
    check.boolean("hippo", "legacy_hippo", legacy_hippo)
    memory, each = machine_memory(), 4 * int(order) * (int(order) + int(block_size))
    check_fits("hippo: order", int(order), 0, each // int(order), memory, "the matrices of one block")
    check_fits("hippo: blocks", int(blocks), 0, each, memory, "the bank")
    folder = pathlib.Path(cache_dir) if cache_dir is not None else cache.folder()
    return _load(int(order), int(block_size), int(blocks), discretization, legacy_hippo, folder, progress)


@functools.lru_cache(maxsize=4)
def _load(
    order: int, size: int, blocks: int, discretization: str, legacy: bool, folder: pathlib.Path, progress: Progress | None
) -> Bank:  # fmt: skip
    transitions = np.empty((blocks, order, order), np.float32)
    kernels = np.empty((blocks, order, size), np.float32)
    per_file = blocks_of_a_file(order, size)
    key = f"legs-{_FORMAT}-{discretization}{'-legacy' if legacy else ''}-n{order}-l{size}"
    for first in range(0, blocks, per_file):
        last = min(first + per_file, blocks)
        path = folder / "elastic" / key / f"{first:06d}-{first + per_file:06d}.npz"
        found = _read(path, (per_file, order, size))
        if found is None:
            found = _build(order, size, first, first + per_file, discretization, legacy, progress)
            _write(path, found)
        transitions[first:last], kernels[first:last] = (x[: last - first] for x in found)
    for x in (transitions, kernels):
        x.flags.writeable = False
    if discretization != "zoh":
        _warn_if_unstable(Bank(transitions, kernels), size, discretization)
    return Bank(transitions, kernels)


def _warn_if_unstable(bank: Bank, size: int, discretization: str) -> None:
    """Also for banks from the cache: only they are read when a run is started again."""
    for m, (p, k) in enumerate(zip(*bank)):
        largest = amplification(p, k, (m + 1) * size)
        if not largest <= 1 + 1e-6:  # rounded to float32
            warnings.warn(
                f"elastic bank: discretization={discretization!r} with order={p.shape[0]} is unstable in block {m} of {size} "
                f"tokens: it amplifies a signal {largest:.1e}-fold, where the exact factor is at most 1. Large factors make the "
                "outputs useless or NaN. Use 'zoh', which is exact, or a smaller order.",
                RuntimeWarning,
                stacklevel=4,
            )
            return


def blocks_of_a_file(order: int, block_size: int) -> int:
    """Number of consecutive blocks in one cache file: about 16 MB, at least one block."""
    return int(np.clip(_NUMBERS_OF_A_FILE // (order * (order + block_size)), 1, _BLOCKS_OF_A_FILE))


def _build(
    order: int, size: int, first: int, last: int, discretization: str, legacy: bool, progress: Progress | None
) -> Bank:
    bank = Bank(np.empty((last - first, order, order), np.float32), np.empty((last - first, order, size), np.float32))
    for m in range(first, last):
        if progress is not None:
            peak = build_bytes(order, size) / 1e9
            progress(f"elastic bank: block {m} of order {order}, {size} tokens; building it takes {peak:.2f} GB")
        p, k = build(order, m * size, (m + 1) * size, discretization, legacy)
        bank.transitions[m - first], bank.kernels[m - first] = p, k
    return bank


def _read(path: pathlib.Path, shape: tuple[int, int, int]) -> Bank | None:
    """The blocks stored in a file, or None if the file is missing or damaged. Each array in the file has a checksum."""
    blocks, order, size = shape
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = file["transitions"], file["kernels"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever NumPy and zipfile raise on damaged content: of a dozen classes
        said = next(iter(str(error).splitlines()), "") or type(error).__name__
        warnings.warn(f"elastic bank: {path} cannot be read ({said}); rebuilding it.", stacklevel=5)
        return None
    shapes = (blocks, order, order), (blocks, order, size)
    described = [
        (getattr(x, "shape", None), getattr(x, "dtype", None)) for x in arrays
    ]  # of other members they are bytes
    if described != [(one, np.float32) for one in shapes]:
        warnings.warn(f"elastic bank: the arrays in {path} do not match its name; rebuilding it.", stacklevel=5)
        return None
    return Bank(*arrays)


def _write(path: pathlib.Path, bank: Bank) -> None:
    """Writes the file atomically, so that processes building the same file do not interfere."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage.replacing(path) as file:
            np.savez(file, transitions=bank.transitions, kernels=bank.kernels)
    except OSError as error:
        warnings.warn(
            f"elastic bank: {path} cannot be written ({error}); it will be rebuilt next time. "
            "Set ATLASJAX_CACHE to a writable folder.",
            stacklevel=5,
        )

"""The facts that must be the same in all processes of a run, and a one-line summary of the processes."""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
from collections import Counter
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import Mesh

from atlasjax.config_json import to_dict
from atlasjax.data.files import expand
from atlasjax.distributed.mesh import num_slices
from atlasjax.train.config import TrainConfig, parse_sets

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")
_ENVIRONMENT = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
)

_MOST_SAMPLED, _BLOCK = 1_000, 2**14  # files, and bytes of each of three blocks


def facts(config: TrainConfig) -> dict[str, object]:
    """The facts that must be the same in all processes of a run: versions, source code, environment, config, and data files.

    Files are compared by name, size and, where they are on a disk, samples of their contents: three blocks of at most 1,000 files.
    Objects in a bucket are compared by name and size, because all processes read the same ones. Everything is JSON.
    """
    settings = to_dict(config)
    settings["processes"] = {
        name: value for name, value in to_dict(config.processes).items() if name not in ("process_id", "timeout")
    }
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "code": {name: _digest(name) for name in ("atlasjax", "pallas_kernels")},
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "config": settings,
        "files": {
            name: _files(paths, config.data.suffixes)
            for name, paths in (
                ("data.paths", config.data.paths),
                ("data.validation_paths", config.data.validation_paths),
                ("data.tokenizer", _tokenizer_paths(config.data.tokenizer)),
                *((f"evaluation_sets.{name}", paths) for name, paths in parse_sets(config.evaluation_sets).items()),
            )
            if paths
        },
    }


def summary(hosts: Sequence[str], mesh: Mesh) -> str:
    """One line about the processes of a run, e.g. "4 processes on 4 hosts, 16 devices (TPU v5 lite) in 1 slice"."""
    kinds = Counter(device.device_kind for device in jax.devices())
    sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return (
        f"{_count(len(hosts), 'process', 'processes')} on {_count(len(set(hosts)), 'host')}, "
        f"{_count(len(jax.devices()), 'device')} ({', '.join(kinds)}) in {_count(num_slices(jax.devices()), 'slice')}; mesh {sizes}"
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(package: str) -> str:
    """A digest of all source files of a package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = pathlib.Path(spec.origin).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _tokenizer_paths(name: str) -> tuple[str, ...]:
    path = name.partition(":")[2]
    return (path,) if path and not path.isdecimal() else ()


def _files(paths: Iterable[str], suffixes: Sequence[str]) -> str:
    """The number of files behind `paths`, their bytes, and a digest of names, sizes and samples of contents, or an error."""
    try:
        files = expand(tuple(paths), suffixes)[0]
        found = [(path.name, path.stat().st_size) for path in files]
        digest = hashlib.sha256(repr(found).encode())
        on_disk = [path for path in files if isinstance(path, pathlib.Path)]
        for path in on_disk[:: -(-len(on_disk) // _MOST_SAMPLED) or 1]:
            digest.update(_sample(path))
    except (OSError, ValueError) as error:
        return str(error)
    return f"{_count(len(found), 'file')}, {sum(size for _, size in found)} bytes, {digest.hexdigest()[:16]}"


def _sample(path: pathlib.Path) -> bytes:
    """Blocks from the beginning, the middle and the end of a file: all of a small file."""
    with path.open("rb") as file:
        last = max(0, os.fstat(file.fileno()).st_size - _BLOCK)
        blocks = []
        for start in (0, last // 2, last):
            file.seek(start)
            blocks.append(file.read(_BLOCK))
    return b"".join(blocks)

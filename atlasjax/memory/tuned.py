"""The backends of `memory.scan` that `atlasjax tune` measured as fastest on this machine, kept in the cache folder.

`memory.scan(implementation=None)` follows a choice for its rule, sizes and dtype on jax's default device. Choices that were
measured with another version of jax, of the engines or of the kernels do not count.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import warnings

import jax
import jax.numpy as jnp

from atlasjax import cache

FILE = "tuned.json"
Key = tuple[str, str, str, str, int, int, str]  # what identifies a choice: its fields but the result


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was measured for one rule and size on one device.

    Attributes:
      device: its kind, such as "TPU v5 lite".
      jax: version of jax.
      sources: digest of engines and kernels (`sources`).
      rule: repr of the rule.
      key_dim, value_dim: of a head.
      dtype: of tokens.
      implementation: the backend to take: "xla", or one that was right and faster.
      ratio_to_xla: the XLA engine's time / that of the fastest other backend that was right, forward and backward. 0 if there is
        none.
    """

    device: str
    jax: str
    sources: str
    rule: str
    key_dim: int
    value_dim: int
    dtype: str
    implementation: str
    ratio_to_xla: float

    @property
    def key(self) -> Key:
        """What identifies it: all but the result."""
        return self.device, self.jax, self.sources, self.rule, self.key_dim, self.value_dim, self.dtype


@functools.cache
def sources() -> str:
    """A digest of the source files of the memories and of the kernels."""
    here = pathlib.Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for folder in (here, here.parents[1] / "pallas_kernels"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def key_of(rule: object, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike) -> Key:
    """The key of a choice for a rule on jax's default device."""
    kind = jax.devices()[0].device_kind
    return kind, jax.__version__, sources(), repr(rule), key_dim, value_dim, jnp.dtype(dtype).name


def read(folder: pathlib.Path | None = None) -> dict[Key, Choice]:
    """All choices of the cache folder by key; none, with a warning, if its file cannot be read."""
    path = (folder or cache.folder()) / FILE
    try:
        modified = path.stat().st_mtime_ns
    except OSError:
        return {}
    return _read(path, modified)


@functools.lru_cache(maxsize=4)
def _read(path: pathlib.Path, modified: int) -> dict[Key, Choice]:
    try:
        choices = [Choice(**row) for row in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(
            f"{path} cannot be read ({error}); its choices do not count. Run `atlasjax tune` again.", stacklevel=2
        )
        return {}
    return {choice.key: choice for choice in choices}


def write(choice: Choice, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Adds a choice to the cache folder, in the place of one with the same key. Returns the file.

    Raises:
      OSError: the folder cannot be written.
    """
    folder = folder or cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    choices = read(folder) | {choice.key: choice}
    path = folder / FILE
    beside = path.with_name(f".{FILE}.{os.getpid()}")
    beside.write_text(json.dumps([dataclasses.asdict(one) for one in choices.values()], indent=1) + "\n")
    beside.replace(path)
    return path


def implementation(rule: object, q: jax.Array, v: jax.Array) -> str | None:
    """The backend chosen for a call on jax's default device; None if nothing was measured for it. Arguments as in `memory.scan`."""
    choices = read()
    if not choices:
        return None
    choice = choices.get(key_of(rule, q.shape[-1], v.shape[-1], q.dtype))
    return None if choice is None else choice.implementation


def platform() -> str:
    """The platform of jax's default device, as backends name it: "cpu", "cuda", "rocm" or "tpu"."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"

"""The backends of `memory.scan` that `atlasjax tune` measured as fastest on this machine, kept in the cache folder.

`memory.scan(implementation=None)` follows a choice for its rule, head sizes and dtype on jax's default device; of several, that of
the call whose size is nearest to its own. Choices that were measured with another version of jax, of the engines or of the kernels
do not count. None counts in a job of several processes: each has a cache folder of its own, and all must run the same program.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import pathlib
import warnings

import jax
import jax.numpy as jnp

from atlasjax import cache, check, json_text, storage

FILE = "tuned.json"
Key = tuple[str, str, str, str, int, int, str]  # what a choice is for: device, versions, rule, head sizes and dtype
_KNOWN = {
    "atlasjax",
    "pallas_kernels",
    "builtins",
    "jax",
    "jaxlib",
    "numpy",
}  # packages whose versions are in the key, or fixed
Shape = tuple[int, int, int]  # batch, time and heads of a call


@dataclasses.dataclass(frozen=True)
class Choice:
    """A measurement of one rule and size on one device.

    Attributes:
      device: its kind, such as "TPU v5 lite".
      jax: version of jax.
      sources: digest of engines and kernels (`sources`).
      rule: repr of the rule, with a digest of the modules of parts that are not of this library.
      key_dim, value_dim: of a head.
      dtype: of tokens.
      shape: batch, time and heads of the call that was measured, on one device.
      implementation: the backend to take: "xla", or one that was right and faster.
      backend: digest of that backend's module if it is not of this library (`own_sources`), otherwise "".
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
    shape: Shape
    implementation: str
    backend: str
    ratio_to_xla: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # a list in JSON
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is str:
                check.require(isinstance(value, str), field.name, value, "a string")
        for name in ("key_dim", "value_dim"):
            check.integer("Choice", name, getattr(self, name))
        sizes = len(self.shape) == 3 and all(check.is_integer(size, 1) and size < 2**63 for size in self.shape)
        check.require(sizes, "shape", self.shape, "three sizes")
        ratio = self.ratio_to_xla
        check.require(check.is_finite(ratio) and ratio >= 0, "ratio_to_xla", ratio, "a number of at least 0")

    @property
    def key(self) -> Key:
        """The device, the versions, the rule and the sizes that were measured."""
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


def own_sources(*parts: object) -> str:
    """A digest of the modules that define the parts, and their fields, if these are not of this library; "" if all are."""
    found: set[str] = set()

    def visit(part: object) -> None:
        kind = type(part)
        if kind.__module__.partition(".")[0] not in _KNOWN:
            try:
                content = pathlib.Path(inspect.getsourcefile(kind) or "").read_bytes()
            except (OSError, TypeError):  # defined in a notebook
                content = b""
            found.add(f"{kind.__module__}.{kind.__qualname__} {hashlib.sha256(content).hexdigest()}")
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            for field in dataclasses.fields(part):
                visit(getattr(part, field.name))

    for part in parts:
        visit(part)
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16] if found else ""


def key_of(rule: object, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike) -> Key:
    """The key of a choice for a rule on jax's default device."""
    kind, own = jax.devices()[0].device_kind, own_sources(rule)
    name = f"{rule!r} {own}" if own else repr(rule)
    return kind, jax.__version__, sources(), name, key_dim, value_dim, jnp.dtype(dtype).name


def read(folder: pathlib.Path | None = None) -> dict[Key, list[Choice]]:
    """The choices of the cache folder by key. An unreadable file does not count, with one warning that names the file.

    A damaged cache stops no `memory.scan`: without it, the library's own table decides (`fastest`).
    """
    try:
        path = (folder or cache.folder()) / FILE
        modified = path.stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        _warn_once(path, str(error))
        return {}
    return _read(path, modified)[0]


@functools.lru_cache(maxsize=4)
def _read(path: pathlib.Path, modified: int) -> tuple[dict[Key, list[Choice]], list[object]]:
    """The choices of a file by key, and its rows that are none, such as those of another version of this library."""
    try:
        if not path.is_file():  # reading a FIFO would wait for ever
            raise ValueError("it is not a file")
        rows = json_text.parse(path.read_bytes(), "it")
        if not isinstance(rows, list):
            raise ValueError("it is not a list")
    except (OSError, ValueError) as error:
        _warn(path, error)
        return {}, []
    choices: dict[Key, list[Choice]] = {}
    others: list[object] = []
    wrong: list[Exception] = []
    for row in rows:
        try:
            choice = Choice(**row)
            choices.setdefault(choice.key, []).append(choice)
        except (TypeError, ValueError) as error:
            others.append(row)
            wrong.append(error)
    if wrong:
        more = f", and {len(wrong) - 1} more rows" if wrong[1:] else ""
        _warn(path, f"{wrong[0]}{more}")
    return choices, others


def _warn(path: pathlib.Path, problem: object) -> None:
    warnings.warn(
        f"{path} cannot be read ({problem}); its choices do not count, those of the library do. Run `atlasjax tune` "
        "again, or remove the file.",
        stacklevel=3,
    )


_warn_once = functools.lru_cache(maxsize=4)(_warn)


def write(choice: Choice, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Adds a choice to the cache folder, in the place of one of the same key and shape. Returns the file.

    Raises:
      OSError: the folder cannot be written.
    """
    folder = folder or cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    found, others = _read(path, path.stat().st_mtime_ns) if path.exists() else ({}, [])
    kept = [one for group in found.values() for one in group if (one.key, one.shape) != (choice.key, choice.shape)]
    rows = [*others, *map(dataclasses.asdict, [*kept, choice])]
    storage.write_whole(path, (json.dumps(rows, indent=1) + "\n").encode())
    return path


def choice_for(rule: object, q: jax.Array, v: jax.Array) -> Choice | None:
    """The measurement for a call on jax's default device, or for the call nearest to it in size; None if nothing was.

    Arguments as in `memory.scan`.
    """
    choices = read()
    if not choices or jax.process_count() > 1:
        return None
    found = choices.get(key_of(rule, q.shape[-1], v.shape[-1], q.dtype), [])
    distance = lambda choice: abs(math.log(max(1, math.prod(choice.shape)) / max(1, math.prod(q.shape[:3]))))
    return min(found, key=distance, default=None)


def platform() -> str:
    """The platform of jax's default device, as backends name it: "cpu", "cuda", "rocm" or "tpu"."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"

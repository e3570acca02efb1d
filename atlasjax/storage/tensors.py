"""Arrays in files of the safetensors format: written one after another, and read with what they must belong to."""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

import atlasjax
from atlasjax import json_text
from atlasjax.storage.paths import AnyPath
from atlasjax.storage.writing import write_whole

_NUMBERS = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8",
            "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?"}  # fmt: skip
DTYPES: dict[str, np.dtype] = {name: np.dtype(code) for name, code in _NUMBERS.items()} | {
    "BF16": jnp.dtype(jnp.bfloat16)
}
"""Name of a dtype in the format → the dtype."""
KINDS = {dtype: name for name, dtype in DTYPES.items()}
_FORMAT = 1  # of what `save` writes
Described = Mapping[str, object]  # values of JSON


def encoded(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], make: Callable[[str], np.ndarray], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The content of a file, header first, then one tensor after another; only one is in memory.

    Args:
      tensors: name → dtype (a name of the format) and shape, in the order of the file.
      make: name → the array, of that dtype and shape.
      metadata: text that the file carries.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned where the file is mapped
    yield struct.pack("<Q", len(text)) + text
    for name, (dtype, shape) in tensors.items():
        array = make(name)
        assert (array.shape, array.dtype) == (shape, DTYPES[dtype]), name
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def named(tree: PyTree, prefix: str = "") -> dict[str, Any]:
    """Name → leaf of a pytree, in the order of its leaves: "prefix.memory.W1", or without a prefix "memory.W1"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator=".")
    return {".".join(filter(None, (prefix, path(keys)))): leaf for keys, leaf in leaves}


def digest(arrays: Mapping[str, jax.Array | np.ndarray], text: str = "") -> str:
    """SHA-256 of a text, and of names, dtypes, shapes and values of arrays in any order, in hexadecimal digits."""
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def save(
    path: AnyPath, kind: str, arrays: Mapping[str, jax.Array | np.ndarray], about: Described, *, mode: int = 0o666
) -> None:
    """Writes arrays and what they belong to. The file appears complete or not at all.

    Args:
      path: the file, replaced if it is there.
      kind: what it is, in words.
      arrays: name → array.
      about: what `load` returns with them, values of JSON.
      mode: permissions on a disk, before the process's umask.

    Raises:
      TypeError: an array has a dtype that the format does not have.
      OSError: the file cannot be written.
    """
    for name, array in arrays.items():
        if array.dtype not in KINDS:
            raise TypeError(
                f"{name} is {array.dtype}, which a file cannot hold; it may be {', '.join(map(str, KINDS))}."
            )
    whole = {name: np.asarray(array) for name, array in arrays.items()}
    described = {name: (KINDS[array.dtype], array.shape) for name, array in whole.items()}
    text = json.dumps(about, ensure_ascii=False)
    metadata = {"kind": kind, "format": str(_FORMAT), "atlasjax": atlasjax.__version__, "about": text}
    metadata["sha256"] = digest(whole, text)
    write_whole(path, b"".join(encoded(described, whole.__getitem__, metadata)), mode=mode)


def load(path: AnyPath, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads what `save` wrote: the arrays, and what they belong to.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is a folder, is damaged, is of another kind, or another version wrote it in a way that this one does not know.
    """
    import safetensors

    where = repr(str(path))
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{where} does not exist.") from None
    except IsADirectoryError:
        raise ValueError(f"{where} is a folder; it must be a file of {kind}.") from None
    try:
        tensors = safetensors.deserialize(content)
        (size,) = struct.unpack("<Q", content[:8])
        found = json_text.parse(content[8 : 8 + size], "its header").get("__metadata__") or {}
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{where} is damaged or not a file of {kind}: {error}.") from None
    if found.get("kind") != kind:
        other = found.get("kind", "other tensors")
        raise ValueError(f"{where} is a file of {_shown(other)}; it must be one of {kind}.")
    if found.get("format") != str(_FORMAT):
        writer, form = _shown(str(found.get("atlasjax"))), _shown(str(found.get("format")))
        raise ValueError(
            f"{where} was written by atlasjax {writer} in format {form}; atlasjax {atlasjax.__version__} reads format {_FORMAT}."
        )
    arrays = {
        name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in tensors
        if tensor["dtype"] in DTYPES
    }
    if digest(arrays, found.get("about", "")) != found.get("sha256"):
        raise ValueError(f"{where} is damaged: its content is not what was saved.")
    about = json_text.parse(found.get("about", "null"), f"{where}: what it belongs to")
    if not isinstance(about, dict):
        raise ValueError(f"{where} is damaged: what it belongs to is {about!r:.80}; it must be an object of JSON.")
    return arrays, about


def entry(about: Mapping[str, Any], name: str, where: str, holds: Callable[[Any], bool], what: str) -> Any:
    """An entry of what `load` returned with the arrays, which anybody may have written.

    Args:
      about: all entries.
      name: which one. One that is not there counts as None.
      where: begins the message.
      holds: whether a value is as it should be.
      what: how it should be, in words.

    Raises:
      ValueError: it is not.
    """
    value = about.get(name)
    if not holds(value):
        raise ValueError(f"{where} is damaged: {name} is {value!r:.80}; it must be {what}.")
    return value


def _shown(text: str) -> str:
    """A text from a file for a message of one line."""
    return text if text.isprintable() and len(text) <= 80 else f"{text!r:.80}"


def difference(saved: object, here: object, name: str) -> str | None:
    """The first difference between two values of JSON, as "name.field is 8 in the file and 16 here"; None if they are equal."""
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in {**here, **saved}:
            found = difference(saved.get(key), here.get(key), f"{name}.{key}")
            if found is not None:
                return found
        return None
    return None if saved == here else f"{name} is {saved!r:.200} in the file and {here!r:.200} here"


def check_arrays(
    arrays: Mapping[str, np.ndarray], expected: Mapping[str, jax.Array | np.ndarray | jax.ShapeDtypeStruct], where: str
) -> None:
    """Raises ValueError unless there are exactly the expected arrays, each of the expected shape and dtype.

    Args:
      arrays: name → array.
      expected: name → what has the shape and the dtype.
      where: begins the message.
    """
    for name in {**expected, **arrays}:
        if name not in arrays or name not in expected:
            raise ValueError(f"{where} {'lacks' if name not in arrays else 'has an unknown tensor'} {name!r}.")
        have, want = arrays[name], expected[name]
        if (have.shape, have.dtype) != (tuple(want.shape), want.dtype):
            raise ValueError(
                f"{where} has {name!r} as {have.dtype} {have.shape}; it must be {want.dtype} {tuple(want.shape)}."
            )

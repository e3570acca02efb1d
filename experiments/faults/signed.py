"""Files that were changed by somebody who made their digests right again, as anybody can: digests find damage, not strangers."""

import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors

from atlasjax.storage import tensors
from atlasjax.train.saving import integrity

Change = Callable[[Any], Any]


def change_about(file: pathlib.Path, change: Change) -> None:
    """Changes what a file of `storage.tensors.save` says that its arrays belong to."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    arrays = {
        name: np.frombuffer(tensor["data"], tensors.DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in safetensors.deserialize(content)
    }
    metadata["about"] = json.dumps(change(json.loads(metadata["about"])))
    metadata["sha256"] = tensors.digest(arrays, metadata["about"])
    kinds = {dtype: name for name, dtype in tensors.DTYPES.items()}
    described = {name: (kinds[array.dtype], array.shape) for name, array in arrays.items()}
    file.write_bytes(b"".join(tensors.encoded(described, arrays.__getitem__, metadata)))


def change_config(run_dir: pathlib.Path, change: Change) -> None:
    """Changes the config of a run: in its folder and in all its checkpoints."""
    file = run_dir / "config.json"
    if file.is_file():
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    for step in (run_dir / "checkpoints").iterdir():
        file = step / "config/data.json"
        config = change(json.loads(file.read_text()))
        file.write_text(json.dumps(config))
        sums = step / "integrity/data.json"
        sums.write_text(json.dumps(json.loads(sums.read_text()) | {".config": integrity.text_sum(config)}))


def with_field(path: tuple[str, ...], value: Any) -> Change:
    """A change that gives the field at a path another value; what is not there is added."""
    name, *rest = path

    def change(whole: Any) -> Any:
        return {**whole, name: with_field(tuple(rest), value)(whole.get(name) or {}) if rest else value}

    return change


def without_field(path: tuple[str, ...]) -> Change:
    """A change that removes a field."""
    name, *rest = path

    def change(whole: Any) -> Any:
        if rest:
            return {**whole, name: without_field(tuple(rest))(whole[name])}
        return {key: value for key, value in whole.items() if key != name}

    return change

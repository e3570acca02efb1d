"""`atlasjax import`."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import tyro

from atlasjax.cli.parsing import parse
from atlasjax.interop import import_weights


@dataclasses.dataclass(frozen=True)
class ImportCommand:
    """Options of `atlasjax import`."""

    path: tyro.conf.Positional[str]
    """Folder with config.json and safetensors."""
    run_dir: str
    """Folder of the run to make, which must not exist."""
    tokenizer: str | None = None
    """"byte", "bpe:<path of a tokenizers JSON file>" or "sentencepiece:<path of a model>". None: tokenizer.json or
    tokenizer.model beside the weights."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of activations. None: that of config.json, or else of the weights; float32 for float16."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    command = parse(ImportCommand, "import", "Makes a run of public weights.", arguments)
    done = import_weights(command.path, command.run_dir, tokenizer=command.tokenizer, dtype=command.dtype)
    print(f"{command.run_dir}: {done.family}, {done.parameters:,} parameters from {done.tensors - done.kept} tensors")
    if done.kept:
        print(f"{done.kept} tensors that are no part of the language model are kept for the export, and not used.")

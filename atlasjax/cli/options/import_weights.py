"""Options of `atlasjax import`."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import tyro

from atlasjax.cli.parsing import parse


@dataclasses.dataclass(frozen=True)
class ImportCommand:
    """Options of `atlasjax import`."""

    path: tyro.conf.Positional[str]
    """Folder with config.json and safetensors, or a name on the Hugging Face Hub, such as state-spaces/mamba-130m-hf."""
    run_dir: str
    """Folder of the run to make, which must not exist."""
    tokenizer: str | None = None
    """"byte", "bpe:<path of a tokenizers JSON file>" or "sentencepiece:<path of a model>". None: tokenizer.json or
    tokenizer.model beside the weights."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of activations. None: the dtype in config.json, or else of the weights; float32 for float16."""
    revision: str | None = None
    """Branch, tag or commit of a name on the Hub. None: the main branch."""
    trust: tuple[str, ...] = ()
    """Modules of your own parts that a model of this library may name, such as my_parts."""


def read(arguments: Sequence[str]) -> ImportCommand:
    """Parses and checks the command line. Raises ConfigError, or SystemExit after help."""
    command = parse(ImportCommand, "import", "Makes a run of public weights.", arguments)
    return command

"""Options of `atlasjax info`."""

import dataclasses
from collections.abc import Sequence

from atlasjax.cli.parsing import parse
from atlasjax.data.config import Packing
from atlasjax.distributed.mesh import MeshConfig
from atlasjax.names import lookup
from atlasjax.plan.topology import check_topology
from atlasjax.presets import PRESETS, preset_names
from atlasjax.train.errors import ConfigError, user_errors


@dataclasses.dataclass(frozen=True)
class InfoCommand:
    """Options of `atlasjax info`."""

    preset: tuple[str, ...] = ("atlas-tiny", "atlas-170m", "atlas-340m", "atlas-760m", "atlas-1.3b")
    """Presets to compare, side by side."""
    size: str | None = None
    """Compare all architectures of this size instead, one per row: tiny, 170m, 340m, 760m, 1.3b; or those of one paper at its own
    size: 98m, 205m, 345m (Elastic Memory), 22m (GAM), 0.8b."""
    names: bool = False
    """Only list the names of architectures and sizes. A preset is <architecture>-<size>."""
    rules: bool = False
    """Only print the table of the memory rules, as Markdown (docs/rules.md)."""
    plan: str | None = None
    """TPUs (v5e:16x16, v5p:8x8x8, …; "2x v5e:16x16" for two slices) or GPUs (h100:8; "2x h100:8" for two hosts). Compiles the full
    training step for them and reports its memory."""
    mesh: MeshConfig | None = None
    """Mesh of the plan. None: one that fits the topology and the batch."""
    batch_size: int | None = None
    """Sequences per batch of the plan. None: the preset's."""
    sequence_length: int | None = None
    """Tokens per sequence. None: the preset's."""
    packing: Packing | None = None
    """How text becomes the sequences of the plan: contiguous, or documents (packed). None: the preset's."""
    accumulation: int | None = None
    """Microbatches per step of the plan. None: the preset's."""
    implementation: str | None = None
    """Implementation of the memories in the plan: xla, pallas_tpu or pallas_gpu. None: the preset's."""


def read(arguments: Sequence[str]) -> InfoCommand:
    """Parses and checks the command line. Raises ConfigError, or SystemExit after help."""
    command = parse(InfoCommand, "info", "Sizes and costs of presets, without making a model.", arguments)
    if command.names or command.rules:
        return command
    if not command.preset and command.size is None:
        raise ConfigError(
            "preset is empty; give the names of presets after --preset, e.g. atlas-tiny. --names lists them."
        )
    if command.size is not None and command.preset != InfoCommand.preset:
        raise ConfigError(
            f"--size {command.size} and --preset {command.preset[0]} both say which presets; leave one of them out."
        )
    with user_errors():
        if command.plan is not None:
            check_topology(command.plan)
        for preset in command.preset if command.size is None else ():
            lookup("preset", preset, PRESETS)
        if command.size is not None:
            preset_names(command.size)
    return command

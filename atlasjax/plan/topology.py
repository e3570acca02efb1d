"""Accelerators by name, as compilation targets: slices of TPUs and machines of GPUs, neither of which needs to be there."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from atlasjax.names import lookup
from atlasjax.plan import cuda, libtpu
from atlasjax.plan.accelerator import Accelerator

if TYPE_CHECKING:
    import jax


class Compiler(Protocol):
    """The interface of the modules `libtpu` and `cuda`."""

    ACCELERATORS: Mapping[str, Accelerator]
    SHAPE: str
    EXAMPLES: str
    PLATFORM: str

    def check_installed(self) -> None:
        """Raises ValueError if the compiler is not installed."""

    def environment(self) -> dict[str, str]:
        """Environment variables that the compiler reads when it is loaded."""

    def devices(self, generation: str, shape: Sequence[int], groups: int) -> "Sequence[jax.Device]":
        """The devices of a topology."""

    def options(self) -> dict[str, Any]:
        """Compiler options."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of accelerators of one kind.

    Attributes:
      name: "v5e:16x16", "2x v5e:16x16" (two slices), "h100:8", "2x h100:8" (two hosts).
      groups: slices of TPUs, or hosts with GPUs. Each has a fast network of its own.
      generation: "v5e", "h100", …
      shape: devices of one group: the torus of a slice, or the number of a host's GPUs.
    """

    name: str
    groups: int
    generation: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Reads a name, without loading a compiler.

        Raises:
          ValueError: the generation is unknown, or the shape is malformed.
        """
        found = re.fullmatch(r"(?:(\d{1,4})x\s*)?([a-z]\w*)(?::(.*))?", name)
        groups, generation, shape = found.groups() if found else (None, name, None)
        compiler = _compiler(generation)
        if not re.fullmatch(compiler.SHAPE, shape or "") or groups == "0":
            raise ValueError(f"topology is {name!r}; it must be like {compiler.EXAMPLES}.")
        assert shape is not None
        return cls(name, int(groups or 1), generation, tuple(int(size) for size in shape.split("x")))

    @property
    def num_devices(self) -> int:
        """The devices of all groups."""
        return self.groups * math.prod(self.shape)

    @property
    def accelerator(self) -> Accelerator:
        """The kind of the devices."""
        return self.compiler.ACCELERATORS[self.generation]

    @property
    def compiler(self) -> Compiler:
        """The compiler for the devices."""
        return _compiler(self.generation)

    def devices(self) -> "Sequence[jax.Device]":
        """The devices, as compilation targets.

        Raises:
          ValueError: the compiler does not know the topology.
        """
        return self.compiler.devices(self.generation, self.shape, self.groups)


def check_topology(name: str) -> None:
    """Checks a topology's name as far as possible without loading a compiler.

    Args:
      name: see `Topology`.

    Raises:
      ValueError: the generation is unknown, the shape is malformed, or the compiler is not installed.
    """
    Topology.parse(name).compiler.check_installed()


def _compiler(generation: str) -> Compiler:
    return lookup("accelerator", generation, _COMPILERS)


_COMPILERS: dict[str, Compiler] = {
    generation: compiler for compiler in (libtpu, cuda) for generation in compiler.ACCELERATORS
}

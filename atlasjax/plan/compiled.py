"""The compiler's report on a program for a topology, extracted from the compiled program and the compiler's messages."""

import collections
import dataclasses
import re

from atlasjax.plan.topology import Topology

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton")
_GATHER = re.compile(r" = (?:\(.*[ (])?([a-z0-9]+\[[\d,]*\])[^ ]* all-gather(?:-start)?\(")
_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization\. (The compiler .*?)(?:, metadata=|\. As the last|$)", re.M
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compiler's report on a program for a topology. Bytes are per device. No value here is a measured speed.

    Attributes:
      topology: e.g. "v5e:16x16" or "h100:8".
      devices: number of devices in the topology.
      mesh: axis → size.
      argument_bytes: the training state and the batch.
      temp_bytes: activations, gradients and the compiler's buffers.
      output_bytes: results, of which alias_bytes reuse the memory of donated arguments.
      alias_bytes: see output_bytes.
      code_bytes: the program's code.
      flops: matmul FLOPs of one call on all devices, with every scan iteration counted (`atlasjax.flops.count_flops`).
      collectives: kind → occurrences in the program's text. A collective inside a loop is counted once.
      kernels: calls of Pallas kernels in the program's text.
      gathers: result type of an all-gather, e.g. "bf16[1024,8000]" → occurrences. The shape is per device.
      rematerialized: the partitioner's distinct warnings about arrays that it could reshard only by replicating them on every
        device ("involuntary full rematerialization").
      compile_seconds: compilation time on this machine.
    """

    topology: str
    devices: int
    mesh: dict[str, int]
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    code_bytes: int
    flops: int
    collectives: dict[str, int]
    kernels: int
    gathers: dict[str, int]
    compile_seconds: float
    rematerialized: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Memory needed per device: arguments, temporaries, code, and results that do not reuse an argument."""
        return self.argument_bytes + self.temp_bytes + self.code_bytes + self.output_bytes - self.alias_bytes

    @property
    def available_bytes(self) -> int:
        """Memory per device available to programs on this topology."""
        return int(Topology.parse(self.topology).accelerator.memory_gib * 2**30)

    @property
    def fits(self) -> bool:
        """Whether the program fits into a device's memory."""
        return self.total_bytes <= self.available_bytes


def collective_counts(text: str) -> dict[str, int]:
    """Number of occurrences of each collective operation in a compiled program's text."""
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in _COLLECTIVES}


def kernel_count(text: str) -> int:
    """Number of Pallas kernel calls in a compiled program's text."""
    return sum(text.count(f'custom_call_target="{name}"') for name in _KERNELS)


def gathers(text: str) -> dict[str, int]:
    """The result types of the all-gathers in a compiled program's text, each with its number of occurrences."""
    return dict(collections.Counter(_GATHER.findall(text)))


def rematerializations(messages: str) -> tuple[str, ...]:
    """The partitioner's warnings in the child's standard error (`Plan.rematerialized`)."""
    return tuple(dict.fromkeys(_REMATERIALIZED.findall(messages)))

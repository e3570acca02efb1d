"""The TPU compiler's report on a program, without a TPU: the schedule of its kernels, and estimates of everything else.

libtpu compiles ahead of time for a chip that is only named. It writes the schedule of every kernel, with one VLIW instruction
("bundle") per line, and gives its own estimate of cycles for every other operation of the compiled program.

    python experiments/benchmarks/tpu_static.py CASE TOPOLOGY FOLDER      # a child process of kernels_tpu.py

CASE is JSON (`kernel_cases.Case`). FOLDER is where the compiler writes, and must be empty. The result is the last line, as JSON.
"""

import dataclasses
import json
import pathlib
import re
import sys
import time
from typing import Any

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from atlasjax.plan import libtpu


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published properties of one chip.

    Attributes:
      flops: peak bfloat16 FLOP/s.
      bandwidth: HBM bytes per second.
      cores: number of TensorCores, each with its own schedule.
      units, edge: matrix units per core, and rows and columns of one.
      operations: operations per cycle of all matrix units of a core at the peak.
      topology: topology for the compiler, of which one chip is used.
      accelerator: its name in environment variables.
    """

    flops: float
    bandwidth: float
    cores: int
    units: int
    edge: int
    operations: int
    topology: str
    accelerator: str

    @property
    def clock(self) -> float:
        """Cycles per second at which the matrix units reach the published peak."""
        return self.flops / (self.cores * self.operations)


# Peak, bandwidth, cores and units: cloud.google.com/tpu/docs/v5e, /v5p and /v6e. A unit of v5e and v5p takes one row of its operand
# a cycle (jax-ml.github.io/scaling-book/tpus: [8, 128] × [128, 128] every 8 cycles; 1.5 GHz on v5e); on v6e, where the compiler
# begins a product of [16, 256] every 8 bundles, two.
CHIPS = {
    "v5e": Chip(197e12, 819e9, 1, 4, 128, 2 * 4 * 128 * 128, "v5e:2x2", "v5litepod-4"),
    "v5p": Chip(459e12, 2765e9, 2, 4, 128, 2 * 4 * 128 * 128, "v5p:2x2x1", "v5p-8"),
    "v6e": Chip(918e12, 1640e9, 1, 2, 256, 2 * 2 * 256 * 256 * 2, "v6e:2x2", "v6e-4"),
}


def environment(chip: Chip, folder: str | None = None) -> dict[str, str]:
    """Environment with which libtpu only compiles, and writes schedules to `folder` if given.

    Only the final schedules are written, because all stages of one kernel take up to a gigabyte.
    """
    dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_.*"
    return {
        **libtpu.environment(chip.accelerator),
        # A cached program would not be scheduled again.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        **({"LIBTPU_INIT_ARGS": dump} if folder else {}),
    }


# ---------------------------------------------------------------------------------------------- schedules


def utilization(text: str) -> dict[str, Any]:
    """Bundles of a schedule, and the use of each kind of slot, from the compiler's table of slots by bundle.

    Returns:
      bundles; slots: the used share of each kind of slot; matrix_unit: that of the matrix units; spills and fills: vector registers
      written to memory and read back for lack of registers.

    Raises:
      ValueError: the table has another form.
    """
    lines = text.splitlines()
    if "== UTILIZATION:" not in lines:
        raise ValueError("no table '== UTILIZATION:' in the compiler's schedule: another libtpu?")
    start = lines.index("== UTILIZATION:")
    names = [name.strip() for name in lines[start - 2].split(",")]
    capacity = dict(zip(names, map(int, lines[start - 1].split()), strict=True))
    rows = [[int(x) for x in line.split()] for line in lines[start + 1 :] if line[:1].isdigit()]
    used = {name: sum(row[i] for row in rows) for i, name in enumerate(names)}
    slots = {name: used[name] / (capacity[name] * len(rows)) for name in names}
    return {
        "bundles": len(rows),
        "slots": {name: round(share, 3) for name, share in slots.items()},
        "matrix_unit": slots["MXU"],
        "spills": used["VSTORE:SPILL"],
        "fills": used["VLOAD:FILL"],
    }


def loops(bundles: str) -> int:
    """Number of loops in a schedule. One is the loop over the grid; bodies of other loops are counted once in the bundles."""
    return len(re.findall(r"^\s*0x[0-9a-f]+\s+LB\b", bundles, re.MULTILINE))


def schedules(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Name of each operation with a schedule in the folder → `utilization` and loops.

    Raises:
      ValueError: two operations have the same name.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*final_hlo-static-per-bundle-utilization.txt"):
        match = re.match(r"\d+-(.+)-\d+-final_hlo", path.name)
        if match is None or match[1].startswith("<"):
            continue
        name = match[1]
        (listing,) = folder.glob(f"{path.name.split('-')[0]}-{name}-*-final_bundles.txt".replace("[", "[[]"))
        if "analysis" in listing.name:
            raise ValueError(listing.name)
        if name in found:
            raise ValueError(f"two schedules of {name}")
        found[name] = utilization(path.read_text()) | {"loops": loops(listing.read_text())}
    return found


# ---------------------------------------------------------------------------------------------- compiled programs

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*)$")
_OPERATION = re.compile(r"(?<![\w.%-])([a-z][a-z0-9-]*)\(")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a compiled program: name, result type (with layout), operation, and everything after its parenthesis."""

    name: str
    type: str
    operation: str
    rest: str


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Name → instructions of each computation in a compiled program (HLO text), and the name of the entry computation."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%(\S+) \(.*\{$", line)
        if head:
            current = head[2]
            entry = current if head[1] else entry
            found[current] = []
        elif current and (match := _INSTRUCTION.match(line)):
            # Types contain tiles such as T(8,128), so the operation is the first lower-case word before a parenthesis.
            operation = _OPERATION.search(match[2])
            if operation:
                kind, rest = match[2][: operation.start()].strip(), match[2][operation.end() :]
                found[current].append(Instruction(match[1], kind, operation[1], rest))
    return found, entry


def trip_count(condition: list[Instruction]) -> int:
    """Iterations of a loop `i < n` that begins at 0, as in `lax.scan`.

    Raises:
      ValueError: the condition has another form.
    """
    constants = {x.name: int(x.rest.split(")")[0]) for x in condition if x.operation == "constant"}
    compares = [x for x in condition if x.operation == "compare"]
    if len(compares) == 1 and "direction=LT" in compares[0].rest:
        operands = re.findall(r"%([\w.-]+)", compares[0].rest.split(")")[0])
        if len(operands) == 2 and operands[1] in constants:
            return constants[operands[1]]
    raise ValueError(f"a loop whose turns are not known: {condition}")


def estimated_cycles(text: str) -> float:
    """XLA's estimate for a compiled program: `estimated_cycles` of its operations, with loop bodies multiplied by their iterations.

    Only the most expensive branch counts. Operations without an estimate (parameters, tuples, asynchronous copies, kernels) count
    as zero: kernels have their own schedule, and copies between memories are assumed to overlap with other work.
    """
    found, entry = computations(text)

    def cost(name: str) -> float:
        total = 0.0
        for x in found[name]:
            called = dict(re.findall(r"(condition|body|to_apply)=%([\w.-]+)", x.rest))
            if x.operation == "while":
                turns = trip_count(found[called["condition"]])
                total += turns * (cost(called["body"]) + cost(called["condition"]))
            elif x.operation == "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", x.rest)
                named = branches[1] if branches else " ".join(re.findall(r"(?:true|false)_computation=%\S+", x.rest))
                total += max(cost(branch) for branch in re.findall(r"%([\w.-]+)", named))
            elif x.operation == "call":
                total += cost(called["to_apply"])
            elif estimate := re.search(r'"estimated_cycles":"(\d+)"', x.rest):
                total += int(estimate[1])
        return total

    return cost(entry)


def kernel_arrays(text: str) -> dict[str, list[str]]:
    """Name of each kernel in a compiled program → types of its operands and results."""
    found, _ = computations(text)
    arrays: dict[str, list[str]] = {}
    for instructions in found.values():
        types = {x.name: x.type for x in instructions}
        for x in instructions:
            if x.operation == "custom-call" and 'custom_call_target="tpu_custom_call"' in x.rest:
                operands = re.findall(r"%([\w.-]+)", x.rest.split(")")[0])
                results = re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", x.type)
                arrays[x.name] = [*(types[name] for name in operands), *results]
    return arrays


def type_bytes(text: str) -> int:
    """Bytes of the arrays of a type such as `(f32[4,8,1,64]{3,2,1,0:T(1,128)}, …)`, in whole tiles."""
    widths = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1}
    total = 0
    for kind, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", text):
        shape = [int(x) for x in dims.split(",")] if dims else []
        order, _, rest = layout.partition(":")
        if order:  # minor to major
            shape = [shape[int(axis)] for axis in reversed(order.split(","))]
        tile = re.search(r"T\(([\d,]+)\)", rest)
        for axis, unit in zip(range(-1, -3, -1), reversed(tile[1].split(",")) if tile else ()):
            if len(shape) >= -axis:
                shape[axis] = -(-shape[axis] // int(unit)) * int(unit)
        size = widths[kind]
        for length in shape:
            size *= length
        total += size
    return total


# ---------------------------------------------------------------------------------------------- one case


def measure(case: Any, chip: Chip, folder: pathlib.Path) -> dict[str, Any]:
    """Compiles a case for a chip. The compiler must be set to write to the folder (see `environment`).

    Returns:
      outside: XLA's estimate of the cycles of everything except kernels; kernels: a list; compile_seconds: processor seconds of the
      compiler, all threads; and for a program with kernels ideal_bytes and program_bytes, the bytes that XLA counts as accessed by
      the operations around them (None with loops, or if XLA does not report it).
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding, use_abstract_mesh

    from experiments.benchmarks import kernel_cases, kernel_work

    function, shapes = kernel_cases.program(case)
    device = topologies.get_topology_desc(chip.topology, platform="tpu").devices[0]
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    mesh = Mesh([device], ("chip",)).abstract_mesh  # tells kernels for which device
    with use_abstract_mesh(mesh):
        lowered = jax.jit(function).lower(*jax.tree.map(place, shapes))
        before = time.process_time()
        compiled = lowered.compile()
        seconds = round(time.process_time() - before, 1)
    text = compiled.as_text()
    outside = estimated_cycles(text)
    if case.engine == "xla":
        return {"outside": outside, "kernels": [], "compile_seconds": seconds}
    scheduled, arrays = schedules(folder), kernel_arrays(text)
    kernels = []
    with use_abstract_mesh(mesh):
        traced = kernel_work.kernels_of(function, shapes)
    for kernel in traced:
        # XLA numbers kernels of the same name in its own order.
        alike = [x for x in arrays if re.fullmatch(rf"{re.escape(kernel.name)}(\.\d+)?", x)]
        (name,) = [x for x in alike if len(arrays[x]) == kernel.arrays]
        counts = {
            "operations": sum(x.operations for x in kernel.products),
            "unit_operations": sum(x.operations * x.passes for x in kernel.products),
            "tile_operations": sum(x.tiled(chip.edge) for x in kernel.products),
        }
        moved = {"block_bytes": kernel.block_bytes, "array_bytes": sum(map(type_bytes, arrays[name]))}
        kernels.append({"name": kernel.name, "steps": kernel.steps, **scheduled[name], **counts, **moved})
    analysis = compiled.cost_analysis()
    return {
        "outside": outside,
        "kernels": kernels,
        "compile_seconds": seconds,
        "ideal_bytes": kernel_cases.ideal_bytes(case),
        "program_bytes": analysis.get("bytes accessed") if " while(" not in text else None,
    }


def main() -> None:
    from experiments.benchmarks.kernel_cases import Case

    case, topology, folder = sys.argv[1:]
    print(json.dumps(measure(Case(**json.loads(case)), CHIPS[topology], pathlib.Path(folder))))


if __name__ == "__main__":
    main()

"""Training steps of half a million tokens, compiled ahead of time for TPU pods and for machines of GPUs. Needs neither.

    python experiments/benchmarks/plans.py                       # atlas-340m and atlas-1.3b for three pods, kernels and XLA engine
    python experiments/benchmarks/plans.py --preset titans-340m --topology v5e:16x16 --implementation pallas_tpu
    python experiments/benchmarks/plans.py --preset titans-340m --topology h100:8 '2x h100:8'
    python experiments/benchmarks/plans.py --preset titans-340m --topology v5e:16x16 --implementation xla --packing documents
    python experiments/benchmarks/plans.py --size 340m 345m 22m --topology v5e:16x16 h100:8 --implementation xla   # all presets

One line of JSON per plan is appended to `--out`. Finished plans are skipped; `--again` repeats them, and the later line counts.
The table (`.md`) is rewritten from the lines each time, with device-hours that are counted then, in about two minutes. Nothing is
run: memory, collectives and kernels are reported by the compiler (libtpu at its lowest effort), and imply no speed. Kernels of the
other platform are left out.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import pathlib
import sys
import typing

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from atlasjax.data.config import Packing
from atlasjax.plan import cuda, device_hours, plan_training, suggested_mesh
from atlasjax.plan.topology import Topology
from atlasjax.plan.training import UTILIZATION, larger_batch
from atlasjax.presets import preset_names
from atlasjax.train import TrainConfig, default_config
from experiments.rows import Row, append_row, read_rows

HERE = pathlib.Path(__file__).resolve().parent
PRESETS = ("atlas-340m", "atlas-1.3b")
TOPOLOGIES = ("v5e:16x16", "v5p:8x8x8", "v6e:16x16")
_ABOUT = f"""# Training steps compiled for TPU pods and GPUs

`python experiments/benchmarks/plans.py`: half a million tokens per step in sequences of 4,096 (32,768 at 345m; at 22m 8,192
tokens in sequences of 256), in microbatches: forward, backward, AdamW and collectives, compiled (for TPUs at the compiler's
lowest effort). Where no mesh divides a preset's sequences, the next number of sequences that one divides. GiB are per device; of a
GPU's memory, jax uses {cuda.MEMORY_FRACTION:.0%} by default. Kernels and collectives are counted in the program's text, with loop
bodies counted once. Copied whole: arrays that the partitioner could reshard only by copying them whole to every device. PFLOP:
matrix products of one step on all devices, with what is computed again.
Device-hours: of all devices together for all tokens of the preset's run, at an assumed model FLOPs utilization of
{UTILIZATION:.0%}. Nothing was run.
"""
IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "xla")


def config(preset: str, topology: str, implementation: str, packing: Packing = "contiguous") -> TrainConfig:
    """A preset's training run with one implementation of its memories, on the mesh that `atlasjax info` suggests, and with a larger
    batch if no mesh divides the preset's."""
    run = default_config(preset)
    data = dataclasses.replace(run.data, packing=packing, batch_size=larger_batch(run, topology))
    run = dataclasses.replace(run, data=data)
    memory = dataclasses.replace(run.model.memory, implementation=implementation)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, memory=memory))
    return dataclasses.replace(run, mesh=suggested_mesh(run, topology))


def plan(preset: str, topology: str, implementation: str, packing: Packing = "contiguous") -> Row:
    """The row of one plan, with "error" if planning failed."""
    run = config(preset, topology, implementation, packing)
    row: Row = {
        "preset": preset,
        "topology": topology,
        "implementation": implementation,
        "accumulation": run.accumulation,
        "packing": packing,
        "batch_size": run.data.batch_size,
    }
    compiler = "jax-cuda13-plugin" if on_gpus(topology) else "libtpu"
    row |= {name: importlib.metadata.version(name) for name in ("jax", compiler)}
    try:
        made = plan_training(run, topology)
    except RuntimeError as error:
        return row | {"error": str(error)}
    return row | {"plan": dataclasses.asdict(made), "total_bytes": made.total_bytes, "fits": made.fits}


def on_gpus(topology: str) -> bool:
    """Whether a topology's devices are GPUs."""
    return Topology.parse(topology).generation in cuda.ACCELERATORS


def key(row: Row) -> tuple[str, str, str, str]:
    return row["preset"], row["topology"], row["implementation"], row.get("packing", "contiguous")


@functools.cache
def _hours(preset: str, topology: str) -> float:
    return device_hours(default_config(preset), topology)


def table(rows: list[Row]) -> str:
    """The last row of each plan as a Markdown page."""
    page = [
        _ABOUT,
        "| preset | devices | memories | microbatches | mesh data × fsdp (× expert) × tensor | state and batch | temporary | "
        "total | of | fits | PFLOP | device-hours | kernels | all-gather, all-reduce, reduce-scatter, all-to-all, permute | "
        "copied whole |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---|---:|---:|---:|---|---:|",
    ]  # fmt: skip
    refused = []
    for row in sorted({key(row): row for row in rows}.values(), key=key):
        preset, topology, implementation, packing = key(row)
        name = preset if packing == "contiguous" else f"{preset}, packed documents"
        usual = default_config(preset).data.batch_size
        if (
            row.get("batch_size", usual) != usual
        ):  # older rows have none, and were refused where no mesh divides the preset's
            name += f", {row['batch_size']} sequences"
        if "error" in row:
            refused.append(f"- {name}, {topology}, {implementation}: {row['error']}")
            continue
        made, gib = row["plan"], lambda x: f"{x / 2**30:.2f}"
        kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
        page.append(
            f"| {name} | {topology} | {implementation} | {row['accumulation']} | {' × '.join(map(str, made['mesh'].values()))} | "
            f"{gib(made['argument_bytes'])} | {gib(made['temp_bytes'])} | {gib(row['total_bytes'])} | "
            f"{Topology.parse(topology).accelerator.memory_gib} | {'yes' if row['fits'] else 'no'} | "
            f"{_number(made['flops'] / 1e15)} | {_number(_hours(preset, topology))} | {made['kernels']} | "
            f"{', '.join(str(made['collectives'][kind]) for kind in kinds)} | {len(made['rematerialized'])} |"
        )
    return "\n".join([*page, *(["", "No plan:", "", *refused] if refused else []), ""])


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=PRESETS)
    parser.add_argument("--size", nargs="+", help="all presets of these sizes, in place of --preset")
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument(
        "--packing", choices=typing.get_args(Packing), default="contiguous", help="how text becomes sequences"
    )
    parser.add_argument("--again", action="store_true", help="repeat finished plans")
    parser.add_argument(
        "--out", type=pathlib.Path, default=HERE / "plans.jsonl", help="file of rows; the table is beside it"
    )
    options = parser.parse_args()
    presets = options.preset if options.size is None else [name for size in options.size for name in preset_names(size)]
    rows = read_rows(options.out)
    done = {key(row) for row in rows if "error" not in row}
    for implementation in options.implementation:
        for preset in presets:
            for topology in options.topology:
                if implementation == ("pallas_tpu" if on_gpus(topology) else "pallas_gpu"):
                    continue
                if (preset, topology, implementation, options.packing) in done and not options.again:
                    continue
                row = plan(preset, topology, implementation, options.packing)
                append_row(options.out, row)
                rows.append(row)
                print(preset, topology, implementation, row.get("error") or f"{row['total_bytes']:,} bytes", flush=True)
    options.out.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()

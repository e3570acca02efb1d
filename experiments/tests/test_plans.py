"""experiments/benchmarks/plans.py: the table, from rows."""

import math
import pathlib
import re

from atlasjax.plan import device_hours
from atlasjax.train import default_config
from experiments.benchmarks import plans
from experiments.rows import read_rows


def test_device_hours_are_those_of_the_code_and_not_of_a_row():
    """Counting FLOPs has changed since some rows were written."""
    preset, topology = "gam-22m", "v5e:16x16"
    made = {
        "mesh": {"data": 1}, "argument_bytes": 0, "temp_bytes": 0, "flops": 0, "kernels": 0, "rematerialized": [],
        "collectives": dict.fromkeys(("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"), 0),
    }  # fmt: skip
    row = {"preset": preset, "topology": topology, "implementation": "xla", "accumulation": 1, "device_hours": 12345.0}
    page = plans.table([row | {"plan": made, "total_bytes": 0, "fits": True}])
    assert f"| {device_hours(default_config(preset), topology):.2g} |" in page
    assert "12,345" not in page


# Bytes of a number, by its name in compiled programs.
BYTES = {"pred": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def gathered(result_type):
    """Bytes of an all-gather's result on each device, from its type, such as "bf16[1024,8000]"."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", result_type)
    return max(BYTES[dtype] * math.prod(int(size) for size in shape.split(",") if size) for dtype, shape in arrays)


def test_no_plan_gathers_more_than_its_embedding():
    """A device that gathers the tokens or states of a whole batch computes all sequences. Parameters are gathered, of which the
    embedding is the largest; in GAM, a sequence's channels, which may be a little more. Experts on several devices read the
    activations, of 16 bits, of all tokens on these."""
    for row in read_rows(pathlib.Path(plans.__file__).with_name("plans.jsonl")):
        plan = row.get("plan") or {}
        run, mesh = default_config(row["preset"]), plan.get("mesh", {})
        model, data = run.model, run.data
        most = 1.1 * 4 * model.vocab_size * model.dim / mesh.get("tensor", 1)
        if "expert" in mesh:
            sequences = data.batch_size // run.accumulation // (mesh["data"] * mesh["fsdp"])
            most = max(most, 2 * sequences * data.sequence_length * model.dim)
        for result_type in plan.get("gathers", {}):
            assert gathered(result_type) <= most, (row["preset"], row["topology"], row["implementation"], result_type)

"""experiments/benchmarks/plans.py: the table, from rows."""

from atlasjax.plan import device_hours
from atlasjax.train import default_config
from experiments.benchmarks import plans


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

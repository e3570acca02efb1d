"""`on_gpu.py` runs from end to end, in its order, with tiny sizes and no GPU."""

import json
import os
import pathlib
import subprocess
import sys

from experiments.benchmarks import on_gpu

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_rehearsal(tmp_path):
    command = [sys.executable, "experiments/benchmarks/on_gpu.py", "--small", "--seconds", "1500"]
    command += ["--out", tmp_path, "--scratch", tmp_path / "scratch"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    log = (tmp_path / "log.txt").read_text()
    parts = (
        "--machine",
        "newton_schulz --dims 64 --directions both --engines",
        "--repeats 1",
        "training_measured.py --out",
    )
    places = [log.index(part) for part in (*parts, "-m atlasjax tune", "--record")]
    assert places == sorted(places)
    assert "exit 1" not in log
    rows = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert "product_teraflops" in json.loads((tmp_path / "machine.json").read_text())
    assert rows("compiled.jsonl")[0].keys() >= {"case", "engine", "checked_s", "compiled_s"}
    assert {row["case"]["direction"] for row in rows("kernels_measured.jsonl")} == {"both", "forward"}
    assert rows("training_measured.jsonl")[0]["tokens_per_second"] > 0


def test_the_most_telling_jobs_come_first(tmp_path):
    jobs = on_gpu.compilations(tmp_path, small=False)
    names = [job.operation for job in jobs]
    assert names[:2] == ["titans_bounded 64", "omeganet_bounded 64"], "those that take longest to compile"
    for job in jobs[: len(on_gpu.BOUNDED) + len(on_gpu.LINEAR)]:
        assert job.arguments[job.arguments.index("--engines") + 1] == "pallas_gpu"
    assert "titans-340m/pallas_gpu" in jobs[len(on_gpu.BOUNDED) + len(on_gpu.LINEAR)].arguments

"""experiments/benchmarks/kernels_measured.py: the check before the clock, rounds, resumption, tables, what is recorded."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
import types

import jax
import numpy as np
import pytest

from atlasjax.memory.fast_weights import fastest, kernels
from experiments.benchmarks import kernels_measured, measured_cases, measured_report, measured_torch, on_gpu
from experiments.benchmarks.kernels_measured import Device, Program
from experiments.benchmarks.measured_cases import ENGINES, OPERATIONS, Case
from tests.marks import some_slow

CPU = Device("cpu", "a CPU, 2 cores", "0.10.2")
H200 = Device("cuda", "NVIDIA H200", "0.10.2")  # no test needs one
COMMAND = "python experiments/benchmarks/kernels_measured.py --dims 64"
SIZES = {"tokens": 2048, "batch": 1, "heads": 2, "matrices": 4}


def case(operation, direction="both", dim=8, dtype="float32"):
    return Case(operation, dim, dtype, direction, 1, 128, 2)


@pytest.mark.parametrize(
    "operation", some_slow(["newton_schulz_gram", "gated_delta_rule", "omeganet"], ["gated_delta_rule", "omeganet"])
)
def test_engines_are_compared_with_the_definition(operation):
    known = {}
    row = kernels_measured.check(case(operation), "xla", CPU, known)
    assert 0 < max(row["error"].values()) < 1e-5
    assert kernels_measured.check(case(operation, "forward"), "xla", CPU, known) is row, "one check for both passes"
    if operation == "gated_delta_rule":
        row = kernels_measured.check(case(operation), "attention", CPU, known)
        assert 0 < max(row["error"].values()) < 1e-5


def test_a_wrong_kernel_gets_no_time(monkeypatch):
    """Wrong in one gradient alone, or not a number; the XLA engine, which the others are compared with, keeps its time."""
    little = measured_cases.small(case("delta_rule"))
    y, gradients = measured_cases.exact(little, "xla")
    change = {}

    def prepare(of, engine, device):
        result = lambda: (y, (*gradients[:-1], jax.tree.map(change.get(engine, lambda x: x), gradients[-1])))
        return Program(lambda calls: None, result, {})

    monkeypatch.setattr(kernels_measured, "prepare", prepare)
    monkeypatch.setattr(measured_torch, "missing", lambda engine: None)
    change["pallas_gpu"], change["xla"] = lambda x: 0.9 * x, lambda x: 0.9 * x
    rows = kernels_measured.measure(case("delta_rule"), H200, 3, {})
    assert rows["pallas_gpu"]["failed"].startswith("wrong: errors of values 0.0e+00, gradients 1.0e-01, allowed 0.001")
    assert "seconds" not in rows["pallas_gpu"]
    assert "seconds" in rows["xla"]
    assert "seconds" in rows["fla"]
    assert rows["pallas_tpu"] == {"refused": "needs a TPU"}
    change["pallas_gpu"] = lambda x: np.full_like(x, np.nan)
    assert "gradients nan" in kernels_measured.measure(case("delta_rule"), H200, 3, {})["pallas_gpu"]["failed"]
    change["pallas_gpu"] = lambda x: x[:, 1:]
    rows = kernels_measured.measure(case("delta_rule"), H200, 3, {})
    assert "has shape" in rows["pallas_gpu"]["failed"]


def test_engines_take_turns_and_one_that_breaks_leaves_the_others(monkeypatch):
    ran = []

    def prepare(of, engine, device):
        if engine == "titans_pytorch":
            raise MemoryError("out of memory\nat a place")
        if engine == "pallas_gpu":
            raise ValueError('memory.scan: implementation="pallas_gpu" cannot run this call: 7 tokens.')
        return Program(lambda calls: ran.append(engine), None, {"temporary_bytes": 3})

    monkeypatch.setattr(kernels_measured, "prepare", prepare)
    monkeypatch.setattr(kernels_measured, "check", lambda *arguments: {})
    monkeypatch.setattr(measured_torch, "missing", lambda engine: None)
    rows = kernels_measured.measure(case("titans"), H200, 3, {})
    assert ran[-9:] == ["xla", "attention", "attention_cudnn"] * 3
    assert len(rows["xla"]["seconds"]) == 3
    assert rows["titans_pytorch"] == {"failed": "MemoryError: out of memory"}
    assert "7 tokens" in rows["pallas_gpu"]["refused"]


def timed(*seconds, **more):
    return {"seconds": list(seconds), "error": {"values": 1e-6, "gradients": 2e-6}, "checked_dtype": "bfloat16", **more}


def line(of, device=H200, **engines):
    return {
        "case": dataclasses.asdict(of), "device": device.name, "platform": device.platform, "jax": device.jax, "sources": "x",
        "command": COMMAND, "engines": engines,
    }  # fmt: skip


def test_a_run_goes_on_where_it_was_stopped(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    cases = measured_cases.all_cases(["titans", "dla"], [64], "bfloat16", **SIZES)[:3]
    ran = []

    def measure(of, device, repeats, known):
        ran.append(of)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return {"xla": timed(float(len(ran)))}

    run = lambda device=H200, again=False: kernels_measured.run_cases(
        cases, device, path, 3, again, COMMAND, measure
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run()
    path.write_text(path.read_text() + '{"case": {"opera')  # killed while it wrote
    found = run()
    assert ran == [*cases, cases[2]]
    assert [json.loads(text) for text in path.read_text().splitlines()] == found
    assert "2 of 3 cases are in lines.jsonl" in capsys.readouterr().out
    run(dataclasses.replace(H200, jax="0.12.0"))
    run(CPU)
    assert len(ran) == 4 + 3 + 3, "another device, another jax"
    short = [dataclasses.replace(x, dim=32) for x in cases]
    kernels_measured.run_cases(short, H200, path, 3, False, COMMAND, measure, seconds=-1.0)
    assert len(ran) == 10
    assert "3 cases are left" in capsys.readouterr().out
    path.write_text(path.read_text().replace(kernels_measured.sources(), "older"))
    run()
    assert "3 of them were measured with an older version of the engines" in capsys.readouterr().out
    last = measured_report.latest(run(again=True))
    assert last[cases[0], H200.name, H200.jax]["engines"]["xla"]["seconds"] == [11.0]


def test_tables(tmp_path, capsys):
    big = Case("omeganet", 64, "bfloat16", "both", 4, 8192, 16)
    small = Case("newton_schulz", 64, "float32", "forward", 256, 0, 0)
    lines = [
        line(big, xla=timed(9.0), attention=timed(9.0)),  # a later line counts
        line(big, xla=timed(0.3), attention=timed(0.15), pallas_gpu=timed(0.1, 0.4, 0.05, temporary_bytes=2**20),
             attention_cudnn={"refused": "no cuDNN"}, pallas_tpu={"refused": "needs a TPU"}),
        line(small, CPU, xla=timed(0.0123), pallas_gpu={"failed": "wrong: errors of values 1.0e+00"}),
        line(dataclasses.replace(big, operation="titans"), xla=timed(0.3), pallas_tpu={"refused": "needs a TPU"}),
    ]  # fmt: skip
    page = measured_report.page(lines)
    assert "| omeganet, d = 64, 4 × 8,192 tokens, 16 heads, bfloat16 | both | xla | 300 (300) |  | 0.5 (0.5) |" in page
    assert "| both | pallas_gpu | 100 (50) | 3 (6) | 1.5 (3) | 1.0 | 1e-06 | 2e-06 |" in page
    assert "| attention | 150 (150) | 2 (2) |  |" in page
    faster = measured_report.page([line(big, attention=timed(0.15), attention_cudnn=timed(0.05), xla=timed(0.3))])
    assert "| xla | 300 (300) |  | 0.167 (0.167) |" in faster
    assert "- pallas_tpu: needs a TPU (omeganet, titans)" in page
    assert "- pallas_gpu: failed, wrong: errors of values 1.0e+00 (newton_schulz)" in page
    assert "| newton_schulz, 256 matrices 64 × 256 | forward | xla | 12.3 (12.3) |" in page
    assert page.index("## NVIDIA H200") < page.index("## a CPU, 2 cores")
    measured_report.show(lines, [big], H200)
    shown = capsys.readouterr().out
    assert "pallas_gpu" in shown
    assert "100 (50)" in shown
    assert "without a time: attention_cudnn: no cuDNN (omeganet)" in shown


def test_what_is_recorded_is_the_least_ratio(tmp_path, capsys):
    path = tmp_path / "fastest.json"
    cases = [x for x in measured_cases.all_cases(list(OPERATIONS), [64], "bfloat16", **SIZES) if x.direction == "both"]
    kernel = {"omeganet": 0.1, "dla": 0.05, "dla_bounded": 0.06, "titans": 0.15, "delta_rule": 0.01}
    kernel |= {"omeganet_bounded": 0.2, "titans_bounded": 0.4}
    lines = [
        line(x, xla=timed(0.3), pallas_gpu=timed(kernel[x.operation]) if x.operation in kernel else {"failed": "wrong"})
        for x in cases
        if x.operation != "atlas"
    ]
    unsupported = 'memory.scan: implementation="pallas_gpu" cannot run this call: Muon.'
    atlas = next(x for x in cases if x.operation == "atlas")
    lines += [line(atlas, xla=timed(0.3), pallas_gpu={"refused": unsupported})]
    kernels_measured.record(lines, cases, H200, COMMAND, path)
    rows = {row.kernel: row for row in fastest.read(path)}
    assert rows["chunk_memory"].ratio_to_xla == 2.0
    assert rows["chunk_memory_bounded"].ratio_to_xla == 0.75
    assert rows["delta_rule"].ratio_to_xla == 0.0, "the gated one was wrong"
    assert set(rows) == {"chunk_memory", "chunk_memory_bounded", "delta_rule", "linear_rule"}
    assert "not recorded: chunk_memory_muon, d = 64, bfloat16: pallas_gpu ran none of it" in capsys.readouterr().out
    assert fastest.fastest("chunk_memory", 64, "bfloat16", path) == {"cuda": "pallas_gpu"}

    # A later run replaces rows of its device; another device's stay; a part of a kernel's operations decides nothing.
    slower = dataclasses.replace(H200, name="NVIDIA A100")
    lines += [line(x, slower, xla=timed(0.1), pallas_gpu=timed(0.2)) for x in cases]
    kernels_measured.record(lines, cases, slower, COMMAND, path)
    lines += [line(x, xla=timed(0.3), pallas_gpu=timed(0.1)) for x in cases]
    kernels_measured.record(lines, cases, H200, COMMAND, path)
    ratios = {(row.kernel, row.device): row.ratio_to_xla for row in fastest.read(path)}
    assert ratios == {(name, H200.name): 3.0 for name in fastest.KERNELS} | {
        (name, slower.name): 0.5 for name in fastest.KERNELS
    }
    before = path.read_text()
    kernels_measured.record(lines, [x for x in cases if x.operation == "titans"], H200, COMMAND, path)
    assert path.read_text() == before
    kernels_measured.record(lines[:1], cases, H200, COMMAND, path)
    assert path.read_text() == before, "the run was stopped early"
    assert "the run is without dla, dla_bounded, omeganet" in capsys.readouterr().out
    kernels_measured.record([line(x, CPU, xla=timed(1.0)) for x in cases], cases, CPU, COMMAND, path)
    assert path.read_text() == before
    assert [x.name for x in tmp_path.iterdir()] == ["fastest.json"]


def test_the_command(tmp_path, monkeypatch, capsys):
    out = tmp_path / "lines.jsonl"
    arguments = ["--only", "newton_schulz", "--dims", "16", "--matrices", "2", "--repeats", "1", "--out", str(out)]
    run = lambda *more: (
        monkeypatch.setattr(sys, "argv", ["kernels_measured.py", *arguments, *more]),
        kernels_measured.main(),
    )
    run()
    found = [json.loads(text) for text in out.read_text().splitlines()]
    assert [x["case"]["direction"] for x in found] == ["forward", "both"]
    assert found[1]["engines"]["xla"]["seconds"][0] > 0
    assert found[1]["engines"]["xla"]["temporary_bytes"] > 0
    assert found[0]["engines"]["pallas_gpu"] == {"refused": "needs a CUDA GPU"}
    assert str(tmp_path) not in out.read_text()
    assert "newton_schulz, 2 matrices 16 × 64" in out.with_suffix(".md").read_text()
    run()
    assert "2 of 2 cases are in lines.jsonl" in capsys.readouterr().out
    checks = tmp_path / "checks.jsonl"
    run("--checks", str(checks), "--compile", "--directions", "both")
    assert "xla, {'checked_s': " in capsys.readouterr().out
    (kept,) = [json.loads(text) for text in checks.read_text().splitlines()]
    assert kept["result"]["error"] == found[1]["engines"]["xla"]["error"]
    kept["result"]["error"]["values"] = 0.5
    checks.write_text(json.dumps(kept) + "\n")
    run("--checks", str(checks), "--again", "--directions", "both")
    last = json.loads(out.read_text().splitlines()[-1])
    assert last["engines"]["xla"]["error"]["values"] == 0.5, "not checked again"
    assert len(out.read_text().splitlines()) == 3
    for more, message in {
        ("--only", "omeganett"): "Did you mean 'omeganet'",
        ("--dims", "0"): "--dims 0, must be at least 1",
        ("--tokens", "63"): "must be at least a chunk, 64",
    }.items():
        with pytest.raises(SystemExit, match=message):
            run(*more)


def test_cases_cover_what_the_table_of_the_fastest_asks():
    """Each operation is in the row that `memory.scan` reads for its rule, and in the command that measures a GPU."""
    assert {*on_gpu.OPERATIONS, *on_gpu.WITHOUT_KERNEL} == set(OPERATIONS)
    for name, kernel in OPERATIONS.items():
        if kernel is not None:
            assert kernels.kernel_of(measured_cases.rule(name)) == kernel
    assert set(OPERATIONS.values()) - {None} == set(fastest.KERNELS)
    assert all(ENGINES[engine] == platform for engine, platform in fastest.PLATFORMS.items())
    cases = measured_cases.all_cases(list(OPERATIONS), [64, 128], "bfloat16", **SIZES)
    assert len({x.name for x in cases}) == len(cases) == 4 * len(OPERATIONS)
    for x in cases:
        assert set(x.engines) <= set(ENGINES)
        if not x.is_matrices:
            assert measured_cases.rule(x.operation).is_bounded == x.operation.endswith("_bounded")
            small = measured_cases.small(x)
            arrays = jax.tree.map(lambda a: (a.shape, a.dtype), measured_cases.inputs(small))
            assert arrays == jax.tree.map(lambda a: (a.shape, a.dtype), measured_cases.shapes(small))
            assert x.tokens == (128 if x.operation == "atlas" else 2048)


NEEDS = "needs the extra 'oracle' (torch, titans-pytorch, fla-core)"


@pytest.mark.skipif(any(importlib.util.find_spec(x) is None for x in ("torch", "titans_pytorch")), reason=NEEDS)
def test_titans_pytorch_runs_here():
    for direction in ("forward", "both"):
        made = measured_torch.program(case("titans", direction), "titans_pytorch", cuda=False)
        made.run(1)
        y, gradients = made.result()
        assert y.shape == (1, 128, 16)
        assert made.temporary_bytes() is None
        assert bool(gradients) == (direction == "both")
        assert all(np.isfinite(x).all() for x in (y, *gradients))


def naive(operation):
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    spec = importlib.util.spec_from_file_location(f"naive_{operation}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_flash_linear_attention_is_asked_for_our_function(monkeypatch):
    """Its kernels need a GPU; its slow references, with the kernels' conventions, stand in their places."""
    pytest.importorskip("torch", reason=NEEDS)
    pytest.importorskip("einops", reason=NEEDS)
    pytest.importorskip("fla", reason=NEEDS)

    def chunk_delta_rule(q, k, v, beta, scale):
        heads_first = [x.transpose(1, 2) for x in (scale * q.shape[-1] ** 0.5 * q, k, v, beta)]
        return naive("delta_rule").delta_rule_recurrence(*heads_first)[0].transpose(1, 2), None

    def chunk_gated_delta_rule(q, k, v, g, beta, scale):
        return naive("gated_delta_rule").naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale=scale)

    def chunk_kda(q, k, v, g, beta, scale, safe_gate):
        return naive("kda").naive_recurrent_kda(q, k, v, g, beta, scale=scale)

    def chunk_gla(q, k, v, g, scale):
        return naive("gla").naive_recurrent_gla(scale * q.shape[-1] ** 0.5 * q, k, v, g)

    def chunk_rwkv7(r, w, k, v, a, b, scale, lower_bound, **options):
        assert (lower_bound <= w).all()
        heads_first = [x.transpose(1, 2) for x in (scale * r.shape[-1] ** 0.5 * r, k, v, a, b, w)]
        return naive("generalized_delta_rule/dplr").dplr_recurrence(*heads_first)[0].transpose(1, 2), None

    for function in (chunk_delta_rule, chunk_gated_delta_rule, chunk_kda, chunk_gla, chunk_rwkv7):
        name = function.__name__.removeprefix("chunk_")
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", types.SimpleNamespace(**{function.__name__: function}))
        of = measured_cases.small(case(name))
        found = measured_torch.program(of, "fla", cuda=False).result()
        assert 0 < max(measured_cases.errors(found, of, "fla").values()) < 1e-5

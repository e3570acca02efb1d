"""experiments/benchmarks/kernels_tpu.py: what it reads from the compiler, counts and resumes. Nothing is compiled here."""

import dataclasses
import json
import math
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from experiments.benchmarks import kernel_cases, kernel_plots, kernel_report, kernel_work, kernels_tpu, tpu_static
from experiments.benchmarks.kernel_cases import Case
from experiments.rows import read_rows
from pallas_kernels.newton_schulz import forms

# From a schedule by libtpu 0.0.42.1, in its spelling.
UTILIZATION = """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 1
4 0 1 2 0 1 1 0 0 0
4 0 0 1 0 0 0 1 1 0
2 0 2 0 0 3 2 1 0 0
"""

BUNDLES = """\
LB: loop body
   0x6   :  { %s7422_s27 = smov 0 } /* End region 102 */
   0x7 LB: > { %11252 = sst [smem:[#allocation6_spill]] %s7341_s21 }
  0x35 PF: > { %v492_v8 = vld [vmem:[%s405_s13] sm:$0x1] }
"""

# A program of a loop of 8 turns around one of 4, a branch, and two kernels.
PROGRAM = """\
HloModule jit_f, is_scheduled=true

%fused (p: f32[4,64]) -> f32[4,64] {
  %p = f32[4,64]{1,0:T(8,128)} parameter(0)
  ROOT %n = f32[4,64]{1,0:T(8,128)} negate(%p), backend_config={"window_config":{"estimated_cycles":"999"}}
}

%inner_cond (c: (s32[], f32[4,64])) -> pred[] {
  %four = s32[]{:T(128)} constant(4)
  %c = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %four), direction=LT
}

%inner (b: (s32[], f32[4,64])) -> (s32[], f32[4,64]) {
  %b = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) parameter(0)
  ROOT %x = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) fusion(%b), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"10"}}
}

%outer_cond (c2: (s32[], f32[4,64])) -> pred[] {
  %eight = s32[]{:T(128)} constant(8)
  %c2 = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%c2), index=0
  ROOT %lt2 = pred[]{:T(512)} compare(%j, %eight), direction=LT
}

%outer (b2: (s32[], f32[4,64])) -> (s32[], f32[4,64]) {
  %b2 = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) parameter(0)
  %y = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) fusion(%b2), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %w = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) while(%y), condition=%inner_cond, body=%inner
}

%cheap (p1: f32[4,64]) -> f32[4,64] {
  %p1 = f32[4,64]{1,0:T(8,128)} parameter(0)
  ROOT %a1 = f32[4,64]{1,0:T(8,128)} copy(%p1), backend_config={"window_config":{"estimated_cycles":"1"}}
}

%dear (p2: f32[4,64]) -> f32[4,64] {
  %p2 = f32[4,64]{1,0:T(8,128)} parameter(0)
  ROOT %a2 = f32[4,64]{1,0:T(8,128)} copy(%p2), backend_config={"window_config":{"estimated_cycles":"5"}}
}

ENTRY %main (q: bf16[2,64,8]) -> f32[4,64] {
  %q = bf16[2,64,8]{1,2,0:T(8,128)(2,1)} parameter(0), metadata={op_name="q"}
  %start = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) copy(%q), backend_config={"window_config":{"estimated_cycles":"100"}}
  %loop = (s32[]{:T(128)}, f32[4,64]{1,0:T(8,128)}) while(%start), condition=%outer_cond, body=%outer
  %branch = f32[4,64]{1,0:T(8,128)} conditional(%q), branch_computations={%cheap, %dear}
  %chunk_scan.3 = (f32[4,1,64]{2,1,0:T(1,128)S(1)}, f32[4,64]{1,0:T(8,128)}) custom-call(%q, %branch), \
custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUzv"}}
  ROOT %out = f32[4,64]{1,0:T(8,128)} get-tuple-element(%chunk_scan.3), index=1
}
"""


def test_a_schedule_is_read():
    found = tpu_static.utilization(UTILIZATION)
    shares = [10 / 16, 0, 3 / 16, 3 / 8, 0, 4 / 12, 3 / 12, 2 / 4, 1 / 4, 1 / 8]
    slots = dict(zip(UTILIZATION.splitlines()[1].split(", "), (round(x, 3) for x in shares)))
    assert found == {"bundles": 4, "slots": slots, "matrix_unit": 10 / 16, "spills": 1, "fills": 3}
    assert tpu_static.loops(BUNDLES) == 1
    with pytest.raises(ValueError, match="UTILIZATION"):
        tpu_static.utilization("something else")


def test_schedules_are_found_by_name(tmp_path):
    for number, name in ((11, "chunk_scan.3"), (12, "<late-finalization>"), (13, "copy.3")):
        (tmp_path / f"{number}-{name}-00-final_hlo-static-per-bundle-utilization.txt").write_text(UTILIZATION)
        (tmp_path / f"{number}-{name}-01-schedule-analysis_final_bundles.txt").write_text("")
        (tmp_path / f"{number}-{name}-02-final_bundles.txt").write_text(BUNDLES)
    found = tpu_static.schedules(tmp_path)
    assert set(found) == {"chunk_scan.3", "copy.3"}
    assert found["chunk_scan.3"] == tpu_static.utilization(UTILIZATION) | {"loops": 1}


def test_cycles_of_loops_are_counted_for_each_turn():
    # The fusion's own computation is not entered, and the dearer branch counts.
    assert tpu_static.estimated_cycles(PROGRAM) == 100 + 8 * (7 + 4 * 10) + 5
    with pytest.raises(ValueError, match="turns are not known"):
        tpu_static.estimated_cycles(
            PROGRAM.replace("compare(%i, %four), direction=LT", "compare(%i, %four), direction=NE")
        )


def test_arrays_are_counted_in_the_tiles_that_hold_them():
    types = tpu_static.kernel_arrays(PROGRAM)
    assert list(types) == ["chunk_scan.3"]
    sizes = [tpu_static.type_bytes(x) for x in types["chunk_scan.3"]]
    # q: its 64 are in lanes, its 8 in sublanes. One row of 64 in tiles of (1, 128); four in tiles of (8, 128).
    assert sizes == [2 * 2 * 8 * 128, 4 * 8 * 128, 4 * 4 * 128, 4 * 8 * 128]


@pytest.mark.parametrize("form", ["direct", "gram"])
def test_products_of_newton_schulz_by_hand(form):
    forward, shapes = kernel_cases.program(Case("newton_schulz", form, 64, "float32", "both", "pallas_tpu"))
    found = kernel_work.kernels_of(forward, shapes)
    assert [kernel.arrays for kernel in found] == [2, 3]
    large, small, steps = 2 * 64 * 64 * 256, 2 * 64**3, kernel_cases.STEPS
    forward_only = forms.operations(64, 256, steps, form, backward=False)
    # The backward kernel takes the steps again, direct: all but the last, whose result nobody needs.
    again = (steps - 1) * (2 * large + small) if form == "direct" else forward_only - large
    back = steps * (5 * large + 3 * small) if form == "direct" else 4 * large + (steps + steps - 1) * 4 * small
    for kernel, wanted in zip(found, (forward_only, again + back), strict=True):
        assert sum(x.operations for x in kernel.products) * kernel.steps == wanted * kernel_cases.MATRICES
        assert {x.passes for x in kernel.products} == {6}
        assert kernel.block_bytes == kernel.arrays * kernel_cases.MATRICES * 64 * 256 * 4


def test_floor_and_bytes_of_the_delta_rule_by_hand():
    dim, m = 32, 64
    case = Case("delta_rule", "plain", dim, "bfloat16", "forward", "pallas_tpu")
    (kernel,) = kernel_work.kernels_of(*kernel_cases.program(case))
    levels = int(math.log2(m))
    tokens = 2 * m * m * dim * 3 + 2 * m * dim * dim * 3  # K Kᵀ, Q Kᵀ, (Q Kᵀ) U; K Wᵀ, Q Wᵀ, Uᵀ K: bfloat16
    # Halves of the system side by side: two products a level but the first two, of half the rows and of half the depth, and three
    # for the solution.
    system = 2 * (levels - 3) * m**3 // 4 + 3 * m * m * dim
    # Groups of one program, of heads side by side, whose products have zeros outside of the diagonal; and its chunks.
    groups, beside, unroll = 8, 2, 4
    # Three passes are one product of three times the depth. β stays a row, which takes no product.
    of_group = beside**2 * (tokens + 3 * system)
    assert sum(x.operations for x in kernel.products) == unroll * groups * of_group
    assert {x.passes for x in kernel.products} == {1}
    rows, chunks = kernel_cases.HEADS, kernel_cases.TIME // m
    assert kernel.steps == rows // (groups * beside) * chunks // unroll
    each = 4 * m * dim * 2 + m * 4  # q, k, v, y; β
    assert kernel.block_bytes == rows * (
        chunks * each + 2 * dim * dim * 4
    )  # the first and the last W stay for a whole row
    y = kernel_cases.TIME * rows * dim * 2
    assert kernel_cases.ideal_bytes(case) == 4 * y + kernel_cases.TIME * rows * 4 + rows * dim * dim * 4


def test_products_without_a_use_and_tiles():
    def kernel(x, y, out):
        jnp.dot(x[...], x[...])
        out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((64, 96), "float32"))
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (64, 96))]
    (found,) = kernel_work.kernels_of(call, shapes)
    (product,) = found.products
    assert (product.rows, product.depth, product.columns, product.passes) == (64, 64, 96, 1)
    # Either side may be the one that is held: 64 rows of it, in a tile of 128, take 96 rows of the other.
    assert product.tiled(128) == 2 * 128 * 128 * 64
    assert dataclasses.replace(product, columns=40).tiled(128) == 2 * 128 * 128 * 40


def row(case, **result):
    made = {"topology": "v5e", "sources": "0", "jax": "1", "libtpu": "2", "seconds": 1.0}
    return {"case": dataclasses.asdict(case), **made, **result}


def rows():
    """Rows of a forward and a backward kernel and of XLA, with round numbers."""
    case = Case("chunk_memory", "mlp", 64, "bfloat16", "forward", "pallas_tpu")
    steps = 1024
    kernel = {
        "name": "chunk_scan", "steps": steps, "bundles": 64 * 30, "matrix_unit": 0.5, "spills": 3, "fills": 4, "loops": 1,
        "operations": 64 * 2 * 131072, "unit_operations": 64 * 3 * 131072, "tile_operations": 64 * 6 * 131072,
        "block_bytes": 150, "array_bytes": 180,
    }  # fmt: skip
    backward = kernel | {"name": "chunk_scan_backward", "bundles": 64 * 90}
    both = dataclasses.replace(case, direction="both")
    xla = lambda case: dataclasses.replace(case, engine="xla")
    rest = {"ideal_bytes": 100, "program_bytes": 400.0}
    return [
        row(case, outside=0.0, kernels=[kernel], compile_seconds=12.5, **rest),
        row(xla(case), outside=65536.0 * 120, kernels=[]),
        row(both, outside=65536.0 * 10, kernels=[kernel, backward], **rest),
        row(xla(both), error="RESOURCE_EXHAUSTED: a | b"),
    ]


def test_table_and_bytes():
    page = kernel_report.table(kernel_report.latest(rows(), "v5e"), "v5e", "the command")
    lines = [line for line in page.splitlines() if line.startswith("| mlp, d = 64")]
    assert lines == [
        "| mlp, d = 64, bfloat16 | forward | 30 | 3 | 10.00 | 5.00 | 50% | 3 | 30 | 120 | 4.00 | 12.5 |",
        "| mlp, d = 64, bfloat16 | backward | 90 | 3 | 30.00 | 15.00 | 50% | 3 | 130 | RESOURCE_EXHAUSTED: a \\| b |  |  |",
    ]
    assert "| chunk_memory mlp, d = 64, bfloat16 | no | 0.0 | 1.50 | 1.80 | 4.00 |" in page
    assert "| chunk_memory mlp, d = 64, bfloat16 | yes | 0.0 | 1.50 | 1.80 |  |" in page


def test_a_kernel_bound_by_memory_costs_the_time_of_its_bytes():
    slow = rows()[0]
    slow["kernels"][0]["array_bytes"] = 819e9  # a second of v5e's memory
    assert kernel_report.program_cycles(slow) == pytest.approx(197e12 / 131072)


def test_finished_cases_are_skipped_and_again_takes_the_last(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    cases = kernel_cases.quick_cases()[:3]
    ran = []

    def run(case):
        ran.append(case.name)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return row(case, outside=float(len(ran)), kernels=[])

    with pytest.raises(KeyboardInterrupt):
        kernels_tpu.measure(cases, "v5e", path, False, run)
    path.write_text(path.read_text() + '{"case": {"opera')  # killed while it wrote
    found = kernels_tpu.measure(cases, "v5e", path, False, run)
    assert ran == [case.name for case in (*cases, cases[2])]
    older = sum(case.engine == "pallas_tpu" for case in cases[:2])
    assert f"{older} of them were compiled with an older version" in capsys.readouterr().out
    assert [json.loads(line) for line in path.read_text().splitlines()] == found
    kernels_tpu.measure(cases[:1], "v5e", path, True, run)
    last = kernel_report.latest(read_rows(path), "v5e")
    assert last[cases[0].name]["outside"] == 5.0
    assert not kernel_report.latest(read_rows(path), "v6e")
    path.write_text("no JSON\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_rows(path)


def test_a_child_that_fails_leaves_its_reason(monkeypatch):
    case = kernel_cases.quick_cases()[0]
    monkeypatch.setattr(kernels_tpu, "HERE", kernels_tpu.HERE / "nowhere")
    found = kernels_tpu.compile_case(case, "v5e", 60)
    assert "No such file" in found["error"]
    assert Case(**found["case"]) == case


def test_pictures_and_page_from_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels_tpu, "ROOT", tmp_path)
    kernels_tpu.report(rows(), "v5e", tmp_path / "rows.jsonl")
    for name in ("rows.png", "docs/figures/chunk_scan.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "1.80" in capsys.readouterr().out
    assert (tmp_path / "rows.md").exists()
    (_, _, _, _, intensity, rate), backward = kernel_plots.points(kernel_report.latest(rows(), "v5e"))
    assert intensity == pytest.approx(64 * 2 * 131072 * 1024 / 180)
    assert rate == pytest.approx(197e12 * 2 / 30)
    assert backward[3]
    assert backward[5] == pytest.approx(197e12 * 2 / 90)
    with pytest.raises(SystemExit, match="no rows for v6e"):
        kernels_tpu.report(rows(), "v6e", tmp_path / "rows.jsonl")


def test_every_case_has_its_own_name_and_bad_choices_are_told(monkeypatch, tmp_path):
    cases = kernel_cases.all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.operation for case in kernel_cases.quick_cases()} == set(kernel_cases.VARIANTS) - {"product"}
    monkeypatch.setattr(sys, "argv", ["kernels_tpu.py", "--only", "nonsense", "--out", str(tmp_path / "x.jsonl")])
    monkeypatch.setattr(kernels_tpu.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit, match="nonsense"):
        kernels_tpu.main()
    monkeypatch.setattr(kernels_tpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"jax\[tpu\]"):
        kernels_tpu.main()

"""Launches are counted as often as loops run."""

import pytest

from experiments.benchmarks.launches import launches

PROGRAM = """
%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} add(%p, %p)
}

%inner (s: (s32[], f32[4])) -> (s32[], /*index=1*/f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %one = f32[4]{0} fusion(%s), kind=kLoop, calls=%fused
  %gemm = (f32[4]{0}, /*index=1*/s8[8]{0}) custom-call(%one, %one), custom_call_target="__cublas$gemm"
  ROOT %t = (s32[], f32[4]{0}) tuple(%s, %one)
}

%outer (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %c = f32[4]{0} copy(%s)
  ROOT %w = (s32[], /*index=1*/f32[4]{0}) while(%s), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %b = f32[4]{0} bitcast(%x)
  %l = (s32[], f32[4]{0}) while(%b), condition=%cond, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %f = f32[4]{0} fusion(%l), kind=kLoop, calls=%fused
}
"""


def test_loops_count_as_often_as_they_run():
    assert launches(PROGRAM) == 5 * (1 + 3 * 2) + 1


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match="unknown number of iterations"):
        launches(PROGRAM.replace('{"n":"5"}', ""))

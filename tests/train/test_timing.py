"""Where the time of a run goes."""

import dataclasses
import re
import time

import jax
import pytest

from atlasjax.train import default_config
from atlasjax.train.reports.timing import Timing, slow_input
from atlasjax.train.reports.utilization import forward_flops_per_token, peak_flops, utilization_per_rate
from tests.train.tiny import config


class Device:
    def __init__(self, kind: str, memory: dict[str, int] | None = None):
        self.device_kind = kind
        self._memory = memory

    def memory_stats(self):
        return self._memory


def test_an_interval():
    timing = Timing(tokens_per_step=100, utilization_per_rate=1e-3)
    with timing.spend("input"):
        time.sleep(0.02)
    values = timing.interval(4, 2.0)
    assert (values["step_seconds"], values["tokens_per_second"], values["utilization"]) == (0.5, 200.0, 0.2)
    assert 0.005 <= values["input_seconds"] < 0.1
    assert timing.interval(2, 1.0)["input_seconds"] == 0.0  # what was spent before counts once
    assert timing.interval(1, 0.0) == {}  # the first step compiles, and is not timed


def test_the_summary_adds_up():
    timing = Timing(tokens_per_step=100)
    assert timing.summary() == ""
    timing.interval(1, 1.0)
    timing.interval(2, 6.0)
    with timing.spend("checkpoint"):
        pass
    line = timing.summary()
    assert line.startswith(
        "timing: 43 tokens/s · step 2 s (median), 3 s (slowest interval) · waiting for input 0.0% · checkpoints "
    )
    assert re.search(r" · goodput \d+% of \d+s$", line)
    assert "MFU" not in line


def test_the_peak_memory_is_that_of_the_fullest_device():
    devices = [Device("TPU", {"peak_bytes_in_use": used * 2**30, "bytes_limit": 16 * 2**30}) for used in (3, 12, 5)]
    timing = Timing(tokens_per_step=100, devices=devices)
    assert timing.interval(1, 1.0)["peak_memory_bytes"] == 12 * 2**30
    assert " · peak memory 12.00 of 16.00 GiB · goodput " in timing.summary()
    for unknown in (None, {"bytes_limit": 1}):
        timing = Timing(tokens_per_step=100, devices=[Device("cpu", unknown)])
        assert "peak_memory_bytes" not in timing.interval(1, 1.0)
        assert "peak memory" not in timing.summary()
    timing = Timing(tokens_per_step=100, devices=jax.local_devices())  # CPUs, in these tests
    assert "peak_memory_bytes" not in timing.interval(1, 1.0)


def test_the_time_to_stop():
    timing = Timing(tokens_per_step=100)
    timing.interval(1, 1.5)
    assert timing.stop_seconds is None
    with timing.spend("checkpoint written"):
        pass
    assert timing.stop_seconds == pytest.approx(3.0, abs=0.01)
    with timing.spend("checkpoint"):
        pass
    assert re.search(r" · checkpoints \d+\.\d% \(\S+ ms each, written after \S+ ms\) · ", timing.summary())


def test_a_process_whose_input_is_late_is_named():
    hosts = ["a", "b", "c"]
    line = slow_input([0.01, 0.4, 0.02], 1.0, hosts)
    assert line == "process 1 (b) waits 400 ms per step for its input, the median process 20 ms; a step takes 1 s."
    assert slow_input([0.01, 0.04, 0.02], 1.0, hosts) is None  # a small part of the step
    assert slow_input([0.3, 0.4, 0.3], 1.0, hosts) is None  # all wait


def test_the_peak_of_devices():
    assert peak_flops([Device("TPU v5 lite")] * 4) == 4 * 197e12
    assert peak_flops([Device("NVIDIA H100 80GB HBM3")]) == 989e12
    assert peak_flops([Device("TPU v5 lite"), *jax.devices()[:1]]) is None


def test_utilization_of_a_known_device(tmp_path):
    run = config(tmp_path)
    assert utilization_per_rate(run, jax.devices()) is None
    expected = 3 * forward_flops_per_token(run) / 197e12
    assert utilization_per_rate(run, [Device("TPU v5 lite")]) == pytest.approx(expected)


@pytest.mark.parametrize("steps", ["", "1", "0:2", "3:2", "1:1000000", "a:b", "1:2:3"])
def test_steps_to_profile_that_are_none(steps):
    with pytest.raises(ValueError, match=r'profile is .*; it must be "first:last", steps from 1 to '):
        type(default_config("atlas-tiny"))(**{**vars(default_config("atlas-tiny")), "profile": steps})


def test_flops_do_not_depend_on_the_machine(monkeypatch):
    """With one device a call considers kernels, which state FLOPs of their own, and so it does where they were measured."""
    config = default_config("gated-delta-rule-340m")
    small = dataclasses.replace(config.model, num_layers=1, dim=128, num_heads=2, mlp_dim=128, vocab_size=64)
    config = dataclasses.replace(config, model=small, data=dataclasses.replace(config.data, sequence_length=128))
    several = forward_flops_per_token(config)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert forward_flops_per_token(config) == several

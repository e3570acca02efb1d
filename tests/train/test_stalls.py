"""The process that the others wait for is named."""

import threading
import time

import pytest

from atlasjax.train.reports.stalls import WAITING, Report, Stalls, late

IDLE = Report(7, WAITING, 80.0, 0.0)
READING = Report(7, "reading its batch", 75.0, 0.0)


@pytest.mark.parametrize(
    ("reports", "hosts", "line"),
    [
        ([IDLE, IDLE], [], None),
        ([READING, READING], [], None),  # none is different
        (
            [IDLE, READING, IDLE],
            ["a", "b", "c"],
            "process 1 (b) has been reading its batch for 75 s, at step 7. The others wait.",
        ),
        ([IDLE, None], [], "process 1 has said nothing. The others wait."),
        (
            [Report(6, WAITING, 90.0, 50.0), IDLE],
            ["a", "b"],
            "nothing was heard of process 0 (a) for 50 s, at step 6. The others wait.",
        ),
        (
            [IDLE, *[READING] * 10],
            [],
            "; ".join(f"process {i} has been reading its batch for 75 s, at step 7" for i in range(1, 9))
            + "; and 2 more. The others wait.",
        ),
    ],
)
def test_what_is_said(reports, hosts, line):
    assert late(reports, hosts) == line


class Shared:
    """A key-value store of several processes."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.lock:
            assert allow_overwrite or key not in self.values
            self.values[key] = value

    def key_value_dir_get(self, key):
        with self.lock:
            return [(name, value) for name, value in self.values.items() if name.startswith(key)]


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_first_process_that_can_speak_names_the_late_one():
    store, said = Shared(), {0: [], 1: [], 2: []}
    make = lambda index: Stalls(store, index, 3, [], said[index].append, after=0.2)
    with make(0) as first, make(1) as second, make(2) as third:
        for each in (first, second, third):
            each.at(5)
        with third.doing("reading its batch"):
            wait_until(lambda: said[0])
        assert not said[1]
        assert "process 2 has been reading its batch for" in said[0][0]
        assert said[0][0].startswith("No progress for ")
        assert said[0][0].endswith("at step 5. The others wait.")


def test_a_silent_process_is_named_by_the_next():
    store, said = Shared(), []
    store.key_value_set("atlasjax/progress/0", '[3, 8, "waiting", 0.5]')
    with Stalls(store, 1, 2, ["a", "b"], said.append, after=0.1):
        wait_until(lambda: said)
    assert "nothing was heard of process 0 (a) for" in said[0]


def test_what_goes_on_is_not_named():
    store, said = Shared(), []
    with Stalls(store, 0, 2, [], said.append, after=0.5) as first:
        for step in range(20):
            first.at(step)
            time.sleep(0.02)
    assert not said


def test_a_job_of_one_process_has_no_thread():
    with Stalls(None, 0, 1, [], print, after=1.0) as alone, alone.doing("reading its batch"):
        assert not any(thread.name == "stalls" for thread in threading.enumerate())

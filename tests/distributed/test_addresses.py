"""Where processes meet, and how one learns that another has ended."""

import socket

import pytest

from atlasjax.distributed import ProcessConfig
from atlasjax.distributed.processes import lost_process
from atlasjax.distributed.rendezvous import bind_address


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_service_listens_on_no_other_interface(host):
    assert bind_address(f"{host}:1234") == "127.0.0.1:1234"


def test_an_address_of_another_machine_is_not_bound():
    assert bind_address("192.0.2.1:1234") is None  # reserved for documentation


def test_a_host_that_does_not_resolve(monkeypatch, capsys):
    def fail(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        ValueError, match=r"'node-0:1234', whose host does not resolve \(Name or service not known; tried for 0 s"
    ):
        bind_address("node-0:1234", patience=0)


@pytest.mark.parametrize("coordinator", ["", "host", "host:", ":1234", "host:0", "host:65536", "host:x", "host:²"])
def test_a_coordinator_that_is_none(coordinator):
    with pytest.raises(ValueError, match=r'processes\.coordinator is .*must be "host:port"'):
        ProcessConfig(True, coordinator, 2, 0)


@pytest.mark.parametrize(("count", "index"), [(0, 0), (2, 2), (2, -1), (2.0, 0), (None, -1)])
def test_a_place_that_is_none(count, index):
    with pytest.raises(ValueError, match=r"processes\.(num_processes|process_id) is"):
        ProcessConfig(True, "host:1", count, index)


def test_the_loss_of_a_process_is_recognized_through_other_errors():
    said = "[external/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    error = ValueError("Saving the checkpoint failed")
    error.__cause__ = RuntimeError(f"INTERNAL: failed\n{said}")
    assert lost_process(error) == said
    assert lost_process(ValueError("no space left on device")) is None

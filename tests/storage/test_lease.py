"""A lease has one holder at a time, whatever fails."""

import threading

import pytest
import tensorstore

from atlasjax import storage
from atlasjax.storage.lease import Lease, LeaseLost, hold
from tests.storage.server import BUCKET, Fault

SECONDS = 1.0


@pytest.fixture
def store():
    return tensorstore.KvStore.open({"driver": "memory"}).result()


def lease(store, owner, seconds=SECONDS):
    return Lease(store, "gs://b/run", owner, seconds)


def quiet(line):
    assert "waiting 1 s to see" in line


def test_it_is_taken_renewed_and_given_back(store):
    for owner in ("first", "second"):
        one = lease(store, owner)
        one.acquire(pytest.fail)  # does not wait: the one before gave it back
        one.confirm()
        one.confirm()
        one.release()
    assert not store.list().result()


def test_a_lease_that_is_renewed_keeps_others_out(store):
    first, stop = lease(store, "process 1 on a"), threading.Event()
    first.acquire()
    thread = threading.Thread(target=first.keep, args=(stop,))
    thread.start()
    try:
        with pytest.raises(ValueError, match=r"run_dir is 'gs://b/run'; another job trains in it \(process 1 on a\)"):
            lease(store, "second").acquire(quiet)
        first.confirm()
    finally:
        stop.set()
        thread.join()


def test_a_lease_that_is_not_renewed_is_taken_over_and_its_holder_stops(store):
    first, second = lease(store, "first"), lease(store, "process 2 on b")
    first.acquire()
    second.acquire(quiet)
    with pytest.raises(LeaseLost, match=r"another job \(process 2 on b\) has taken over"):
        first.confirm()
    first.release()  # not its own any more
    second.confirm()


def test_of_many_that_wait_one_gets_it(store):
    lease(store, "dead").acquire()
    wanting, got, refused = [lease(store, f"process {i}") for i in range(8)], [], []

    def want(one):
        try:
            one.acquire(quiet)
            got.append(one)
        except ValueError:
            refused.append(one)

    threads = [threading.Thread(target=want, args=(one,)) for one in wanting]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    got[0].confirm()


def test_a_lease_that_is_given_back_meanwhile(store):
    first, second = lease(store, "first", seconds=30.0), lease(store, "second")
    first.acquire()
    threading.Timer(0.3, first.release).start()
    second.acquire(lambda line: None)
    second.confirm()


@pytest.mark.parametrize("content", [b"", b"not JSON", b"[]"])
def test_content_of_another_kind(store, content, monkeypatch):
    monkeypatch.setattr("atlasjax.storage.lease.SECONDS", 0.2)
    store.write("lease", content).result()
    lease(store, "first").acquire(lambda line: None)


def test_in_a_bucket(server):
    folder = storage.path(f"gs://{BUCKET}/leased")
    with hold(folder, "first", seconds=SECONDS) as confirm:
        assert server.names("leased/") == ["leased/lease"]
        with pytest.raises(ValueError, match="another job trains in it"), hold(folder, "second", say=quiet):
            pass
        confirm()
    assert server.names("leased/") == []


def test_an_answer_that_is_lost(server):
    """The write was done and is repeated; the second time the generation is not the one that it names."""
    folder = storage.path(f"gs://{BUCKET}/lost")
    lost = Fault(lambda method, path: method == "POST", status=503, after=True, times=1)
    with server.faulty(lost), hold(folder, "first") as confirm:
        assert lost.seen == 1
        lost.seen = 0
        confirm()
        assert lost.seen == 1


def test_no_bucket_and_no_access(server):
    """Of the bucket too: Orbax asks for it at the third checkpoint."""
    bucket = Fault(lambda method, path: path.partition("?")[0].endswith(f"/b/{BUCKET}"), status=403)
    with (
        server.faulty(bucket),
        pytest.raises(storage.AccessError, match=r"gs://pod/x: access is refused .*Legacy Bucket Reader"),
        hold(storage.path(f"gs://{BUCKET}/x"), "first"),
    ):
        pass
    assert server.names("x/") == []
    with (
        pytest.raises(ValueError, match="run_dir is 'gs://none/run'; there is no such bucket"),
        hold(storage.path("gs://none/run"), "first"),
    ):
        pass
    with (
        server.faulty(Fault(lambda method, path: method == "POST", status=403)),
        pytest.raises(
            storage.AccessError, match=r"gs://pod/x: access is refused .*GOOGLE_APPLICATION_CREDENTIALS"
        ) as caught,
        hold(storage.path(f"gs://{BUCKET}/x"), "first"),
    ):
        pass
    assert "\n" not in str(caught.value)

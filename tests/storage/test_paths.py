"""Paths on a disk, in memory and in a bucket behave the same; what goes wrong is one line."""

import pathlib

import pytest

from atlasjax import storage
from atlasjax.storage import paths
from tests.storage.server import BUCKET, Fault


def anything(method, path):
    return True


@pytest.fixture(params=["memory", "gs"])
def folder(request, server):
    made = storage.path(f"{request.param}://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}")
    yield made
    if made.exists():
        made.rmtree()


def test_local_names_are_paths_of_pathlib(tmp_path):
    for name in ("runs/x", "/tmp/x", tmp_path, "a:b", "x:/y"):
        assert storage.path(name) == pathlib.Path(name)
    assert storage.path(f"file://{tmp_path}") == tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gz://b/x", r"'gz://b/x' cannot be opened. Unknown scheme 'gz'. Did you mean 'gs'"),
        ("no-such-thing://b", r"Unknown scheme 'no-such-thing'"),
        ("simplecache::gs://b/x", r"Unknown scheme 'simplecache::gs'"),
        (pathlib.Path("gs://b/x"), r"'gs:/b/x' is neither a path nor a URL; did you mean 'gs://b/x'"),
        ("gs://", "names no bucket; it must be gs://bucket/folder"),
    ],
)
def test_names_that_are_refused(name, words):
    with pytest.raises(ValueError, match=words) as caught:
        storage.path(name)
    assert "\n" not in str(caught.value)


def test_what_must_be_on_a_disk(tmp_path):
    assert storage.local_path(tmp_path) == tmp_path
    with pytest.raises(ValueError, match=r"'memory://b/x' is in a store; it must be on a disk"):
        storage.local_path("memory://b/x")


def test_a_missing_package_is_named(monkeypatch):
    import fsspec

    def missing(scheme):
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ValueError, match=r"a package is missing \(pip install 'atlasjax\[gcs\]'\)"):
        storage.path("gs://b/x")


def test_files_and_folders(folder):
    assert not folder.exists()
    assert not folder.is_dir()
    assert folder.files() == list(folder.glob("*")) == []
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "a" / "é.txt"
    for content in (b"first", b"second", b"", b"\x00\r", b"\n", b"a\r\n", b"--==0==--"):
        storage.write_whole(file, content)
        assert file.read_bytes() == content
        assert storage.path(str(file)).stat().st_size == folder.files()[0].stat().st_size == len(content)
    (folder / "b.txt").write_bytes(b"0123456789")
    (folder / "a" / "10").write_bytes(b"")
    assert (file.is_file(), file.is_dir(), folder.is_dir(), (folder / "a").is_dir()) == (True, False, True, True)
    assert not (folder / "a" / "é").exists()
    assert list(folder.iterdir()) == [folder / "a", folder / "b.txt"]
    assert folder.files() == [folder / "a" / "10", file, folder / "b.txt"]
    assert list((folder / "a").glob("[0-9]*")) == [folder / "a" / "10"]
    assert (folder / "*.txt").matches() == [folder / "b.txt"]
    assert (folder / "**/*.txt").matches() == [file, folder / "b.txt"]
    assert (file.name, file.suffix, file.parent, file.with_name("x")) == (
        "é.txt",
        ".txt",
        folder / "a",
        folder / "a" / "x",
    )
    with (folder / "b.txt").open() as stream:
        stream.seek(4)
        assert stream.read(3) == b"456"
    (folder / "a").rename(str(folder / "c"))
    assert folder.files() == [folder / "b.txt", folder / "c" / "10", folder / "c" / "é.txt"]
    (folder / "c").rmtree()
    assert list(folder.iterdir()) == [folder / "b.txt"]
    with pytest.raises(FileNotFoundError, match=f"{folder}/c/10 does not exist"):
        (folder / "c" / "10").read_bytes()


def test_what_another_process_writes_is_seen(server):
    """Nothing is cached, neither what is there nor what is not."""
    import fsspec

    folder = storage.path(f"gs://{BUCKET}/others")
    assert not folder.is_dir()
    other = fsspec.filesystem("gs", skip_instance_cache=True)
    for number in range(3):
        other.pipe_file(f"{BUCKET}/others/{number}", b"x")
        assert len(list(folder.iterdir())) == len(folder.files()) == number + 1
    other.rm(f"{BUCKET}/others", recursive=True)
    assert not folder.exists()


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_says_what_to_do(server, status):
    with server.faulty(Fault(anything, status)):
        for ask in (storage.path(f"gs://{BUCKET}/x").exists, storage.path(f"gs://{BUCKET}/x").read_bytes):
            with pytest.raises(
                storage.AccessError, match=r"access is refused .*gcloud auth application-default"
            ) as caught:
                ask()
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done, answer lost"])
def test_errors_that_pass_are_not_noticed(server, no_pauses, after):
    file = storage.path(f"gs://{BUCKET}/passing")
    for status in (500, 503, 429):
        with server.faulty(Fault(anything, status, after, times=3)):
            file.write_bytes(str(status).encode())
        with server.faulty(Fault(anything, status, times=3)):
            assert file.read_bytes() == str(status).encode()


def test_an_error_that_stays_is_not_taken_for_an_empty_bucket(server, no_pauses):
    folder = storage.path(f"gs://{BUCKET}/staying")
    (folder / "x").write_bytes(b"x")
    with server.faulty(Fault(anything, 503)):
        for ask in (folder.exists, folder.is_dir, folder.files, (folder / "x").read_bytes):
            with pytest.raises(storage.StoreError, match=r"gs://pod/staying\S*: the store did not answer") as caught:
                ask()
            assert "\n" not in str(caught.value)


def test_silence_is_not_waited_for(server, no_pauses, monkeypatch):
    """An answer that does not come is asked for again."""
    import fsspec

    monkeypatch.setattr(paths, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(fsspec.config, "conf", {})
    paths._configure.cache_clear()
    file = storage.path(f"gs://{BUCKET}/silent")
    file.write_bytes(b"x")
    paths._configure.cache_clear()
    with server.faulty(Fault(anything, seconds=2.0, times=2)):
        assert file.read_bytes() == b"x"
    with server.faulty(Fault(anything, seconds=0.1)):
        assert file.read_bytes() == b"x"

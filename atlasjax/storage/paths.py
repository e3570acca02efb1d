"""Paths of files and folders: on a disk (`pathlib`), or in a store that a URL names (`fsspec`)."""

import contextlib
import fnmatch
import functools
import glob
import logging
import os
import pathlib
import types
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Literal

from atlasjax import json_text
from atlasjax.names import causes, lookup

if TYPE_CHECKING:
    import fsspec

_SILENT_SECONDS = 60.0  # a request is tried again when nothing came for so long
_PACKAGES = {"gs": "atlasjax[gcs]", "gcs": "atlasjax[gcs]", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}
_LOGIN = {
    "gs": "Log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key's file; on the "
    "bucket the account needs the roles Storage Object Admin and Storage Legacy Bucket Reader."
}


class StoreError(OSError):
    """A store did not answer, or not as it should. The message names the URL and what was said."""


class AccessError(StoreError):
    """A store refused a request: no credentials, or not the right ones."""


class StorePath:
    """A file or folder of a store, with those methods of `pathlib.Path` that this library uses.

    A bucket has no folders: one is there while a file is in it, and `mkdir` does nothing. A file is written whole or not at all.
    Nothing is cached, so what other processes write is seen. Requests that fail for a moment are repeated by the store's library.

    Args:
      url: "scheme://…".

    Raises (all methods):
      FileNotFoundError: there is no such file.
      AccessError: the store refused it.
      StoreError: the store did not answer.
    """

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self._size: int | None = None

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"StorePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: "StorePath") -> bool:
        return self._url < other._url

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The file's extension with its dot, or ""."""
        return pathlib.PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "StorePath":
        """The folder that holds it."""
        return StorePath(self._url.rpartition("/")[0])

    @property
    def scheme(self) -> str:
        """The beginning of the URL, such as "gs"."""
        return self._url.partition("://")[0]

    @property
    def bucket(self) -> str:
        """The first part of the URL after its scheme."""
        return self._url.partition("://")[2].partition("/")[0]

    @property
    def key(self) -> str:
        """The URL after its bucket."""
        return self._url.partition("://")[2].partition("/")[2]

    def with_name(self, name: str) -> "StorePath":
        """A neighbour."""
        return self.parent / name

    def absolute(self) -> "StorePath":
        """Itself: a URL is absolute."""
        return self

    def exists(self) -> bool:
        """Whether it is a file, or a folder with a file in it."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Whether there is a file below it."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._kind() == "file"

    def iterdir(self) -> Iterator["StorePath"]:
        """Files and folders directly in the folder, sorted."""
        with self._explained():
            found = self._fs.ls(self._path, detail=False)
        # Some stores list the folder itself among its files.
        yield from sorted(self / name for name in {one.rstrip("/").rpartition("/")[2] for one in found} - {self.name})

    def files(self) -> list["StorePath"]:
        """All files below the folder, sorted; empty if there is none."""
        with self._explained():
            found = self._fs.find(self._path, detail=True)
        return [self._below(name, info) for name, info in sorted(found.items())]

    def matches(self) -> list["StorePath"]:
        """The files that the URL matches as a pattern (*, ?, [], **), sorted."""
        folder = self
        while glob.has_magic(folder._url):
            folder = folder.parent
        with self._explained():
            found = self._fs.glob(self._path, detail=True)
        return [folder._below(name, info) for name, info in sorted(found.items()) if info["type"] == "file"]

    def glob(self, pattern: str) -> Iterator["StorePath"]:
        """Files and folders directly in the folder that match a pattern, sorted; none without the folder."""
        if self.is_dir():
            yield from (one for one in self.iterdir() if fnmatch.fnmatchcase(one.name, pattern))

    def stat(self) -> types.SimpleNamespace:
        """st_size, the bytes of the file; as they were when a folder was listed, if it was found there."""
        if self._size is None:
            with self._explained():
                self._size = int(self._fs.info(self._path)["size"])
        return types.SimpleNamespace(st_size=self._size)

    def read_bytes(self) -> bytes:
        """The content of the file."""
        with self._explained():
            return self._fs.cat_file(self._path)

    def write_bytes(self, content: bytes) -> None:
        """Writes the file, in the place of one that is there."""
        with self._explained():
            self._fs.pipe_file(self._path, content)
        self._size = len(content)

    def open(self, mode: Literal["rb"] = "rb") -> IO[bytes]:
        """The file for reading, with a position."""
        with self._explained():
            return self._fs.open(self._path, mode)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there as soon as a file is in it."""

    def rename(self, target: str) -> None:
        """Copies a file or folder to another URL of the store, then deletes it here: if that ends half-way, all is here."""
        with self._explained():
            self._fs.copy(self._path, target, recursive=True)
            self._fs.rm(self._path, recursive=True)

    def unlink(self) -> None:
        """Deletes the file."""
        with self._explained():
            self._fs.rm_file(self._path)

    def rmtree(self) -> None:
        """Deletes all files below the folder."""
        with self._explained():
            self._fs.rm(self._path, recursive=True)

    def _kind(self) -> str | None:
        try:
            with self._explained():
                return self._fs.info(self._path)["type"]
        except FileNotFoundError:
            return None

    def _below(self, name: str, info: dict[str, Any]) -> "StorePath":
        found = StorePath(self._url + name.removeprefix(self._path))
        found._size = info.get("size")  # a listing has the sizes: no request for each file
        return found

    @functools.cached_property
    def _opened(self) -> "tuple[fsspec.AbstractFileSystem, str]":
        import fsspec

        # What Google stored is as long as what was sent. Its client puts a newline after a file, which belongs to the boundary.
        checks = {"consistency": "size"} if self.scheme in ("gs", "gcs") else {}
        with self._explained():
            return fsspec.core.url_to_fs(self._url, use_listings_cache=False, **checks)

    @property
    def _fs(self) -> "fsspec.AbstractFileSystem":
        return self._opened[0]

    @property
    def _path(self) -> str:
        return self._opened[1]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what the libraries of the stores raise into OSErrors of one line."""
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(f"{self._url} does not exist.") from None
        except Exception as error:
            raise explained(self._url, error) from error


AnyPath = pathlib.Path | StorePath


def path(name: "str | os.PathLike[str] | StorePath") -> AnyPath:
    """The path that a string names: a URL ("gs://bucket/folder") or a path of this machine.

    Raises:
      TypeError: it is neither a string nor a path.
      ValueError: the URL's scheme is unknown, its package is missing, or it has no bucket.
    """
    if isinstance(name, StorePath):
        return name
    if not isinstance(name, str | os.PathLike):
        raise TypeError(f"a path must be a string or a path object, got {name!r}.")
    text = os.fspath(name)
    scheme, separator, rest = text.partition("://")
    if separator:
        if scheme == "file":
            return pathlib.Path(rest)
        _check_scheme(scheme, text)
        if not rest.strip("/"):
            raise ValueError(f"{text!r} names no bucket; it must be {scheme}://bucket/folder.")
        _configure()
        return StorePath(text)
    scheme, separator, rest = text.partition(":/")  # as pathlib writes "gs://bucket"
    if separator and scheme in _schemes():
        raise ValueError(f"{text!r} is neither a path nor a URL; did you mean '{scheme}://{rest}'?")
    return pathlib.Path(text)


def expanded(name: "str | os.PathLike[str] | StorePath") -> AnyPath:
    """`path`, with the home folder for a "~" at the beginning.

    Raises:
      ValueError: as `path`; or there is no such user.
    """
    found = path(name)
    try:
        return found if isinstance(found, StorePath) else found.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(found)!r} names a folder that is not known here: {error}") from None


def local_path(name: str | os.PathLike[str]) -> pathlib.Path:
    """The path of this machine that a string names, where a store cannot be read or written.

    Raises:
      ValueError: it is a URL.
    """
    found = path(name)
    if isinstance(found, StorePath):
        raise ValueError(
            f"{str(found)!r} is in a store; it must be on a disk of this machine: copy it, or mount the store."
        )
    return found


def read_json(path: AnyPath, *, once: bool = False) -> Any:
    """The JSON value of a file. once: whether an object with the same key twice is refused.

    Raises:
      ValueError: it is not JSON (`json_text.parse`); the message names the file.
      OSError: it cannot be read; FileNotFoundError: it is not there.
    """
    return json_text.parse(path.read_bytes(), repr(str(path)), once=once)


def read_object(path: AnyPath) -> dict[str, Any]:
    """A file's JSON object; {} if there is no file, or if it has another value.

    Raises:
      ValueError: it is not JSON.
    """
    if not path.is_file():
        return {}
    found = read_json(path)
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def explaining(path: AnyPath) -> Iterator[None]:
    """Turns what other libraries raise about a path in a store into OSErrors of one line; changes nothing on a disk."""
    with path._explained() if isinstance(path, StorePath) else contextlib.nullcontext():
        yield


def is_outage(error: BaseException) -> bool:
    """Whether an error, or one behind it, is a store that did not answer or refused to; not what was read from it."""
    libraries = ("aiohttp", "requests", "gcsfs", "google")
    # Words of tensorstore, and of gcsfs in an OSError.
    statuses = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "Forbidden: ")
    for cause in causes(error):
        if isinstance(cause, StoreError) or type(cause).__module__.partition(".")[0] in libraries:
            return True
        if any(status in str(cause) for status in statuses):
            return True
    return False


def explained(url: str, error: BaseException) -> StoreError:
    """The error of a store's library as ours, in one line."""
    said = " ".join(str(error).split()).partition(" [")[0].rstrip(". ") or type(error).__name__
    words = ("Forbidden", "PERMISSION_DENIED", "UNAUTHENTICATED")
    code = str(getattr(error, "code", ""))
    if code in ("401", "403") or said.startswith(words) or "Credentials" in type(error).__name__:
        login = _LOGIN.get(url.partition("://")[0], "Check the credentials of this machine.")
        return AccessError(f"{url}: access is refused ({said[:200]}). {login}")
    return StoreError(f"{url}: the store did not answer as it should ({said[:200]}).")


def _check_scheme(scheme: str, text: str) -> None:
    import fsspec

    try:
        lookup("scheme", scheme, dict.fromkeys(_schemes()))
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be opened. {error}") from None
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        helps = f"pip install '{package}'" if package else str(error)
        raise ValueError(f"{text!r} cannot be opened: a package is missing ({helps}).") from None


@functools.cache
def _schemes() -> frozenset[str]:
    import fsspec

    return frozenset(fsspec.available_protocols()) - {"file", "local"}


@functools.cache
def _configure() -> None:
    """Settings that hold for Orbax's own use of the stores too; what the user has set stays."""
    os.environ.setdefault("EPATH_USE_TF", "false")  # one client of the bucket, whether or not TensorFlow is installed
    logger = logging.getLogger("gcsfs")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)  # it logs tracebacks of what it raises
    with contextlib.suppress(ImportError):
        import aiohttp
        import fsspec

        silent = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
        for name, value in {"use_listings_cache": False, "requests_timeout": silent}.items():
            fsspec.config.conf.setdefault("gcs", {}).setdefault(name, value)

"""Files of the Hugging Face Hub, through its own client: a download goes on where it stopped, and stays in the client's cache."""

import contextlib
import glob
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from atlasjax.names import causes
from atlasjax.storage.paths import AccessError, AnyPath, StoreError, StorePath, expanded

SCHEME = "hf://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(f"{_PART}/{_PART}")
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "huggingface_hub")
_KINDS = {"datasets": "dataset", "spaces": "space"}


def is_name(text: str) -> bool:
    """Whether a text can be the name of a repository, "owner/name"."""
    return _NAME.fullmatch(text) is not None


def snapshot(
    name: str, revision: str | None = None, *, kind: str = "model", wanted: Sequence[str] = (), but: Sequence[str] = ()
) -> pathlib.Path:
    """The folder in the cache with files of a repository, which are downloaded if they are not there.

    Without network it is the folder of an earlier download. With the environment variable HF_HUB_OFFLINE nothing is asked for.

    Args:
      name: "owner/name".
      revision: a branch, tag or commit. None: the main branch.
      kind: "model", "dataset" or "space".
      wanted: patterns of the files' names. Empty: all.
      but: patterns of those that are not wanted.

    Raises:
      ValueError: there is no such repository or revision.
      AccessError: it is not open to everybody.
      StoreError: the Hub does not answer, and there was no earlier download.
    """
    import huggingface_hub

    with _explained(name, revision):
        found = huggingface_hub.snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=list(wanted) or None, ignore_patterns=list(but) or None
        )  # fmt: skip
    return pathlib.Path(str(found))


def files(name: str, revision: str | None = None) -> list[str]:
    """The names of the files of a model. Raises as `snapshot`; there is no answer without network."""
    import huggingface_hub

    with _explained(name, revision):
        return huggingface_hub.HfApi().list_repo_files(name, revision=revision)


def fetched(name: "str | os.PathLike[str] | StorePath") -> AnyPath:
    """The path of `expanded`; for "hf://…" that of `local`. Raises the errors of both."""
    return local(name) if isinstance(name, str) and name.startswith(SCHEME) else expanded(name)


def local(url: str, beside: Sequence[str] = ()) -> pathlib.Path:
    """The path in the cache of what a URL names: a file, a folder or a pattern, which is downloaded if it is not there.

    Args:
      url: "hf://datasets/owner/name/data/*.parquet", "hf://owner/name@revision/tokenizer.json".
      beside: names of files that are taken from the same folder, if they are there.

    Raises:
      ValueError, AccessError, StoreError: as `snapshot`, or the URL names no repository.
      FileNotFoundError: the repository has no such file.
    """
    rest = url.removeprefix(SCHEME)
    first, _, after = rest.partition("/")
    kind = _KINDS.get(first, "model")
    owner, _, inside = (rest if kind == "model" else after).partition("/")
    name, _, path = inside.partition("/")
    name, _, revision = name.partition("@")
    # A revision has no slash, except revisions of pull requests and conversions.
    if revision == "refs":  # refs/pr/1, refs/convert/parquet
        more = path.split("/", 2)
        revision, path = "/".join(["refs", *more[:2]]), "".join(more[2:])
    if not is_name(f"{owner}/{name}"):
        raise ValueError(
            f"{url!r} names no repository; it must be hf://datasets/OWNER/NAME/FILE or hf://OWNER/NAME/FILE."
        )
    path = path.rstrip("/")
    folder = path.rpartition("/")[0]
    wanted = [path, f"{path}/*", *(f"{folder}/{other}".lstrip("/") for other in beside)] if path else []
    found = snapshot(f"{owner}/{name}", revision or None, kind=kind, wanted=wanted) / path
    if not glob.has_magic(path) and not found.exists():
        raise FileNotFoundError(f"{url} does not exist.")
    return found


@contextlib.contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Turns what the client raises into one line."""
    from huggingface_hub import constants, errors

    which = repr(name) if revision is None else f"{name!r} at revision {revision!r}"
    try:
        yield
    except Exception as error:
        chain = list(causes(error))
        if any(isinstance(cause, errors.GatedRepoError) for cause in chain):
            raise AccessError(
                f"{which} is given to those who accept its terms at {constants.ENDPOINT}/{name}; then run `hf auth login`."
            ) from None
        if isinstance(error, errors.RevisionNotFoundError):
            raise ValueError(f"{name!r} has no revision {revision!r} on {constants.ENDPOINT}.") from None
        if isinstance(error, errors.RepositoryNotFoundError):
            raise ValueError(
                f"{name!r} is neither a path here nor a name on {constants.ENDPOINT}; if it is private, run `hf auth login`."
            ) from None
        if isinstance(error, errors.HFValidationError):
            raise ValueError(_line(error)) from None
        if constants.HF_HUB_OFFLINE and isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
            raise StoreError(
                f"{which} is not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set; run `hf download {name}` "
                "where there is a network."
            ) from None
        if isinstance(error, OSError) or type(chain[-1]).__module__.partition(".")[0] in _CLIENTS:
            what = "does not give" if isinstance(error, errors.HfHubHTTPError) else "cannot be reached for"
            raise StoreError(
                f"{constants.ENDPOINT} {what} {which} ({_line(chain[-1])}), and the cache does not have all of it."
            ) from None
        raise


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]

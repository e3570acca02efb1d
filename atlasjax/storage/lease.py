"""A lease, which keeps a second job out of a folder of a bucket, where files cannot be locked.

It is an object that its owner writes again and again. Whoever finds it waits for as long as it runs: if it was not renewed
meanwhile, its owner has ended without giving it back, and it is taken over. Every write names the generation that it replaces, and
the store refuses it if another came first, so that two never hold it. Clocks of two machines are not compared.
"""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from atlasjax import json_text
from atlasjax.storage.paths import StoreError, StorePath, explained

if TYPE_CHECKING:
    import tensorstore

SECONDS = 60.0
_RENEWALS = 4  # while it runs
_FILE = "lease"


class LeaseLost(StoreError):
    """Another job has taken the lease over, after it was not renewed for long enough."""


@contextlib.contextmanager
def hold(
    folder: StorePath, owner: str, *, seconds: float = 0.0, say: Callable[[str], None] = print
) -> Iterator[Callable[[], None]]:
    """Holds the lease of a folder, renewed by a thread. Gives a function that raises LeaseLost if it is no longer held.

    Args:
      folder: the folder, in a bucket on gs://.
      owner: who holds it, for the message to another job.
      seconds: how long it runs without being renewed. 0: `SECONDS`.
      say: is told once that there is something to wait for.

    Raises:
      ValueError: another job holds it, or the bucket does not exist.
      StoreError: the bucket cannot be reached or written.
    """
    _check_bucket(folder)
    lease = Lease(_store(folder), str(folder), owner, seconds or SECONDS)
    lease.acquire(say)
    stop = threading.Event()
    thread = threading.Thread(target=lease.keep, args=(stop,), name="lease", daemon=True)
    thread.start()
    try:
        yield lease.confirm
    finally:
        stop.set()
        thread.join(timeout=lease.seconds)
        lease.release()


class Lease:
    """One holder of a lease, or one who wants to be.

    Args:
      store: a tensorstore.KvStore whose writes can name the generation that they replace.
      name: the folder, for messages.
      owner: who holds it, for messages.
      seconds: how long it runs without being renewed.
    """

    def __init__(self, store: "tensorstore.KvStore", name: str, owner: str, seconds: float):
        self.seconds = seconds
        self._store, self._name = store, name
        self._token = uuid.uuid4().hex  # tells our own writes from others
        self._content = json.dumps({"owner": owner, "seconds": seconds, "token": self._token}).encode()
        self._generation = b""
        self._renewing = threading.Lock()

    def acquire(self, say: Callable[[str], None] = print) -> None:
        """Takes the lease, after waiting for one that is not renewed any more. Raises as `hold`."""
        found = self._read()
        if found.state == "value":
            found = self._wait(found, say)
        self._replace(found.stamp.generation, self._held)

    def confirm(self) -> None:
        """Renews the lease. Raises LeaseLost if it is another's now, StoreError if the store does not answer."""
        with self._renewing:
            self._replace(self._generation, self._lost)

    def keep(self, stop: threading.Event) -> None:
        """Renews the lease until `stop` is set or it is lost."""
        while not stop.wait(self.seconds / _RENEWALS):
            try:
                self.confirm()
            except LeaseLost:
                return  # the next `confirm` of the holder says it
            except StoreError:
                continue  # the store is away; the lease runs for a while yet

    def release(self) -> None:
        """Gives the lease back, if it is still held."""
        with contextlib.suppress(StoreError), self._renewing:
            self._write(None, self._generation)

    def _wait(
        self, found: "tensorstore.KvStore.ReadResult", say: Callable[[str], None]
    ) -> "tensorstore.KvStore.ReadResult":
        runs, said = _described(found.value)
        # A lease says itself how long it runs; a damaged one should not keep us waiting for ever.
        deadline = time.monotonic() + min(runs, 10 * self.seconds)
        say(f"{self._name}: its last job ({said}) did not end properly, or runs; waiting {runs:g} s to see.")
        while time.monotonic() < deadline:
            time.sleep(min(1.0, runs / 10))
            now = self._read()
            if now.state != "value":
                return now
            if now.stamp.generation != found.stamp.generation:
                raise self._held(now.value)
        return found

    def _replace(self, generation: bytes, refusal: Callable[[bytes], Exception]) -> None:
        written = self._write(self._content, generation)
        if not written:  # another came first; or our write was answered by an error, and repeated
            now = self._read()
            if now.state != "value" or _saved(now.value).get("token") != self._token:
                raise refusal(now.value)
            written = now.stamp.generation
        self._generation = written

    def _held(self, value: bytes) -> Exception:
        return ValueError(
            f"run_dir is {self._name!r}; another job trains in it ({_described(value)[1]}). Give another run_dir, or wait until it "
            "has ended."
        )

    def _lost(self, value: bytes) -> Exception:
        return LeaseLost(
            f"{self._name}: another job ({_described(value)[1]}) has taken over, as this one did not renew its lease for "
            f"{self.seconds:g} s. This one stops, and writes nothing more."
        )

    def _read(self) -> "tensorstore.KvStore.ReadResult":
        try:
            return self._store.read(_FILE).result()
        except Exception as error:
            raise explained(self._name, error) from error

    def _write(self, content: bytes | None, generation: bytes) -> bytes:
        """The new generation, empty if the object is not of `generation`."""
        try:
            return self._store.write(_FILE, content, if_equal=generation).result().generation
        except Exception as error:
            raise explained(self._name, error) from error


def _described(value: bytes) -> tuple[float, str]:
    """(seconds that a lease runs, its owner)."""
    saved = _saved(value)
    try:
        return float(saved["seconds"]), str(saved["owner"])
    except (ValueError, KeyError, TypeError):
        return SECONDS, "an unknown process"


def _saved(value: bytes) -> dict[str, Any]:
    """The content of a lease; empty if it is not one of ours."""
    with contextlib.suppress(ValueError):
        found = json_text.parse(value, "the lease")
        return found if isinstance(found, dict) else {}
    return {}


def _check_bucket(folder: StorePath) -> None:
    """Asks for the bucket itself, as Orbax does when it deletes an old checkpoint: a run must not find out then that it may not.

    Raises:
      ValueError: there is no such bucket.
      StoreError: it cannot be asked for.
    """
    from google.cloud import storage

    try:
        storage.Client().get_bucket(folder.bucket)
    except Exception as error:
        if getattr(error, "code", None) == 404:
            raise ValueError(f"run_dir is {str(folder)!r}; there is no such bucket.") from error
        raise explained(str(folder), error) from error


def _store(folder: StorePath) -> "tensorstore.KvStore":
    import tensorstore

    spec = {
        "driver": "gcs",
        "bucket": folder.bucket,
        "path": f"{folder.key}/" if folder.key else "",
        "context": {"gcs_request_retries": {"max_retries": 6}},  # by default it retries for longer than a lease runs
    }
    return tensorstore.KvStore.open(spec).result()

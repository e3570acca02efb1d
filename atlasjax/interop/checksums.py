"""`SHA256SUMS` beside exported weights: safetensors have no checksum, so a bit that flips on a disk would be read as a number.

It is a file of `sha256sum`; `sha256sum --check SHA256SUMS` compares it too.
"""

import hashlib
import pathlib
import re
from collections.abc import Iterable

from atlasjax.interop.files import check_file
from atlasjax.storage import write_whole
from atlasjax.train.errors import ConfigError

FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")


def save(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Writes the checksums of files in a folder."""
    write_whole(folder / FILE, "".join(f"{_sum(folder / name)}  {name}\n" for name in names).encode())


def check(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Compares files with their checksums, if the folder has any. A file that they do not name is not compared.

    Raises:
      ConfigError: a file is another one, or the checksums are not readable.
    """
    sums = folder / FILE
    check_file(sums)
    if not sums.is_file():
        return
    try:
        lines = [_LINE.fullmatch(line) for line in sums.read_text("utf-8").splitlines()]
    except UnicodeDecodeError:
        lines = [None]
    if None in lines:
        raise ConfigError(f"{str(sums)!r} is damaged; each line must be a SHA-256 and the name of a file.")
    expected = {line[2]: line[1] for line in lines if line is not None}
    for name in names:
        if expected.get(name) not in (None, _sum(folder / name)):
            raise ConfigError(
                f"{str(folder / name)!r} is not the file whose SHA-256 {FILE} has: it is damaged, or was changed since. Without "
                f"{FILE} it is read as it is."
            )


def _sum(file: pathlib.Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()

"""Reads one string column of Parquet files (such as FineWeb), one row group at a time."""

import bisect
import contextlib
import difflib
import functools
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from atlasjax import storage
from atlasjax.data.files import expand

_MAX_BLOCKS = 16  # row groups kept in memory and shuffled together
_CACHE_BYTES = 512 * 2**20  # fewer row groups are kept if they are large


class ParquetDocuments:
    """The rows of one string column of Parquet files, one document each. A missing value is an empty document.

    Strings may be stored in any way: as strings, large strings or string views, or as a dictionary of them, such as a category of
    pandas.

    Only footers are read at construction. A row is read with its whole row group. The most recent row groups stay in memory: at
    most 16 and at most 512 MiB, but at least one.

    Raises:
      FileNotFoundError: a path does not exist, or a folder has no *.parquet file.
      ValueError: a file is not Parquet, has no such column, or its column does not hold strings; or there are no rows. While
        reading: a page is damaged or a row is not UTF-8. The message then names the file and the row.
    """

    def __init__(self, paths: Sequence[str], column: str):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._files, _, left_out = expand(paths, (".parquet",))
        left_out.say(paths)
        self._column = column
        self._metadata = []
        groups, sizes, num_bytes = [], [], []
        for number, file in enumerate(self._files):
            try:
                with _opened(file) as source:
                    metadata = pq.read_metadata(source)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"The data file {str(file)!r} is not a Parquet file: {error}") from None
            index = _string_column(metadata, column, file)
            self._metadata.append(metadata)
            for group in range(metadata.num_row_groups):
                groups.append((number, group))
                sizes.append(metadata.row_group(group).num_rows)
                num_bytes.append(metadata.row_group(group).column(index).total_uncompressed_size)
        self._groups = groups
        self.block_offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        if not len(self):
            raise ValueError(f"The Parquet files under {', '.join(map(repr, paths))} have no rows.")
        self.blocks_in_memory = int(np.clip(_CACHE_BYTES // max(1, *num_bytes), 1, _MAX_BLOCKS))
        self._read = functools.lru_cache(maxsize=self.blocks_in_memory)(self._read_group)

    def _read_group(self, block: int) -> "_Rows":
        import pyarrow as pa
        import pyarrow.parquet as pq

        file, group = self._groups[block]
        try:
            with (
                _opened(self._files[file]) as source,
                pq.ParquetFile(source, metadata=self._metadata[file], memory_map=True) as parquet,
            ):
                # One thread: several documents are read at the same time, by threads of the pipeline.
                return _Rows(parquet.read_row_group(group, columns=[self._column], use_threads=False).column(0).chunks)
        except (pa.ArrowException, OSError) as error:
            start, end = map(int, self.block_offsets[block : block + 2])
            first, last = self._row(block, start), self._row(block, end - 1)
            raise ValueError(
                f"The data file {str(self._files[file])!r} is damaged in rows {first} to {last} (column {self._column!r}): "
                f"{' '.join(str(error).split())}"
            ) from None

    def _row(self, block: int, index: int) -> int:
        """The row of a document in its file, counted from 0."""
        return index - int(self.block_offsets[block - self._groups[block][1]])

    def __len__(self) -> int:
        return int(self.block_offsets[-1])

    def __getitem__(self, index: int, /) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"Document {index} of {len(self)}.")
        block = int(np.searchsorted(self.block_offsets, index, side="right")) - 1
        try:
            return self._read(block)[index - int(self.block_offsets[block])]
        except UnicodeDecodeError as error:
            raise ValueError(
                f"The data file {str(self._files[self._groups[block][0]])!r} is not UTF-8 in row {self._row(block, index)} (column "
                f"{self._column!r}): {error.reason} at byte {error.start}."
            ) from None


class _Rows:
    """The values of a row group, which pyarrow gives in chunks: a whole of them would take time for each value to find its own."""

    def __init__(self, chunks: Sequence[Any]):
        self._chunks = chunks
        self._ends = list(itertools.accumulate(map(len, chunks)))

    def __getitem__(self, index: int) -> str:
        which = bisect.bisect_right(self._ends, index)
        return self._chunks[which][index - self._ends[which]].as_py() or ""


@contextlib.contextmanager
def _opened(file: storage.AnyPath) -> Iterator[pathlib.Path | IO[bytes]]:
    """The argument for pyarrow: a path, which it can memory-map, or a stream from a store."""
    if not isinstance(file, storage.StorePath):
        yield file
        return
    with file.open() as stream:
        yield stream


def _string_column(metadata, column: str, file: storage.AnyPath) -> int:
    """Return the position of `column` among the leaf columns of a file. Raises ValueError if it does not hold strings."""
    import pyarrow as pa

    schema = metadata.schema.to_arrow_schema()
    if column not in schema.names:
        close = difflib.get_close_matches(column, schema.names, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"The data file {str(file)!r} has no column {column!r}.{hint} It has: {', '.join(schema.names)}."
        )
    kind = schema.field(column).type
    stored = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(stored) or pa.types.is_large_string(stored) or pa.types.is_string_view(stored)):
        raise ValueError(f"Column {column!r} of the data file {str(file)!r} has type {kind}; it should hold strings.")
    return next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == column)

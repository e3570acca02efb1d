"""Prepares a data set on many machines: `preparation.prepare` as two pipelines of Apache Beam (the extra `beam`).

The first one tokenizes the parts of the source, one element each. The second one deals their documents to the final files, in the
order that one machine would give them: what a final file needs of a part is looked up by the file, grouped by the part, read there
once, and grouped by the file. One machine would make the same tokens, order and manifest.

A finished part or file has its description (.json) beside it and is not made again. A file is written elsewhere and put in its
place whole, so that an attempt that a runner repeats, or makes twice at the same time, does no harm.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

from atlasjax import check, storage
from atlasjax.data import manifest as manifest_lib
from atlasjax.data import preparation_steps as steps
from atlasjax.data.checked_files import close_files
from atlasjax.data.config import DataConfig, Split
from atlasjax.data.inputs import open_inputs
from atlasjax.data.manifest import SHARD_TOKENS, Manifest
from atlasjax.data.token_files import SIZE, TokenFile, TokenFiles, TokenWriter
from atlasjax.data.tokenizers import Tokenizer, load_tokenizer
from atlasjax.data.windows import token_dtype, with_sizes

_PIECE = 2**20  # most tokens of an element: runners have limits of some megabytes
_Wanted = tuple[str, np.ndarray, np.ndarray]  # a final file, and places in its split and documents of a part
# A document's place, the number of a piece of it, its ids, and the bytes of each.
_Piece = tuple[int, int, bytes, bytes]


def prepare_on_beam(
    config: DataConfig,
    directory: str | storage.AnyPath,
    options: Sequence[str],
    *,
    shard_tokens: int = SHARD_TOKENS,
    on_report: Callable[[steps.Report], None] | None = None,
) -> Manifest:
    """`prepare` on a runner of Apache Beam. A second call resumes, on any machine.

    Args:
      config: as of `prepare`. Every worker must reach the source under the same paths.
      directory: output folder, which every worker reaches under the same path: in a bucket, or on a shared disk.
      options: Beam's own options, such as ("--runner=DataflowRunner", "--project=…", "--region=…", "--temp_location=gs://…").
        Workers need atlasjax, which the options of the runner say how to install.
      shard_tokens: approximate number of tokens per output file. A worker has one in memory.
      on_report: called after each of the two stages.

    Returns:
      The manifest.

    Raises:
      ValueError, FileNotFoundError: as `prepare`.
      RuntimeError: the pipeline failed. Finished files are kept.
    """
    check.require(check.is_integer(shard_tokens, 1), "shard_tokens", shard_tokens, "an integer of at least 1")
    request = steps.request_of(config) | {"shard_tokens": shard_tokens}
    folder = storage.expanded(directory).absolute()
    if (folder / manifest_lib.FILE).exists():
        return steps.finished(config, folder, request)
    inputs = open_inputs(config)
    if not (folder / steps.REQUEST).exists() and folder.exists() and any(folder.iterdir()):
        raise steps.other_files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = functools.partial(_run, tuple(options))
    with steps.held(folder):
        job = steps.begin(config, folder, inputs, request, on_report)
        plans = job.plans(_tokenized(job, run))
        return job.finish(_dealt(job, plans, run), plans)


_Run = Callable[[Callable[[beam.Pipeline], object]], None]


def _run(options: Sequence[str], build: Callable[[beam.Pipeline], object]) -> None:
    """Runs a pipeline to its end."""
    try:
        pipeline = beam.Pipeline(options=PipelineOptions(list(options)))
        build(pipeline)
        pipeline.run().wait_until_finish()
    except Exception as error:  # a runner's own, with the errors of workers as text
        said = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), type(error).__name__)
        said = said.partition(" [while running")[0]
        raise RuntimeError(
            f"the pipeline of Beam failed: {said[:500]} Finished parts are kept: run the same command again to resume."
        ) from error


# Tokenizing


def _tokenized(job: steps.Preparation, run: _Run) -> dict[str, TokenFile]:
    """The token files of all parts, by name."""
    parts, tasks = job.folder / "parts", job.parts
    kept = steps.descriptions(parts, tasks)
    waiting = [task for name, task in tasks.items() if name not in kept]
    if waiting:
        encode = _Encode(job.config, str(job.folder), job.inputs.digest)
        run(lambda pipeline: pipeline | beam.Create(waiting) | beam.Reshuffle() | "Tokenize" >> beam.ParDo(encode))
    written = steps.descriptions(parts, tasks)
    tokens, before = (sum(file.tokens for file in files.values()) for files in (written, kept))
    job.report(steps.Report("tokenizing", len(tasks), len(tasks), "parts", 1.0, tokens, before))
    return written


class _Encode(beam.DoFn):
    """Writes the token file of a part."""

    def __init__(self, config: DataConfig, folder: str, digest: str):
        self._config, self._folder, self._digest = config, folder, digest

    def setup(self) -> None:
        self._inputs = open_inputs(self._config)
        if self._inputs.digest != self._digest:
            raise ValueError(
                "A worker finds other files in the source than the machine that began. All must reach the same ones under the same "
                "paths, as in a bucket or on a shared disk."
            )
        self._tokenizer = load_tokenizer(storage.path(self._folder) / "tokenizer")

    def process(self, task: tuple[int, int]) -> None:
        number, part = task
        dtype, sized = token_dtype(self._tokenizer.vocab_size), not self._tokenizer.is_exact
        write = lambda writer: steps.encode_part(
            self._inputs.parts[number][part], self._tokenizer, steps.separator_of(self._config), writer
        )
        _written(storage.path(self._folder) / "parts", f"{number}-{part:06d}", dtype, write, sized=sized)


def _written(
    folder: storage.AnyPath, name: str, dtype: np.dtype, write: Callable[[TokenWriter], None], *, sized: bool
) -> None:
    """Writes a token file on the disk of this worker, then puts it in its folder, its description last."""
    with storage.temporary_folder("prepare") as local:
        with TokenWriter(local, name, dtype, sized=sized) as writer:
            write(writer)
        for part in writer.finished.parts(dtype).values():
            storage.write_whole(folder / part.name, (local / part.name).read_bytes())
    storage.write_whole(folder / f"{name}.json", json.dumps(dataclasses.asdict(writer.finished)).encode())


# Shuffling


def _dealt(job: steps.Preparation, plans: dict[Split, steps.Gathered], run: _Run) -> dict[str, TokenFile]:
    """The final files, by name."""
    tasks = steps.final_files(plans)
    kept = steps.descriptions(job.folder, tasks)
    waiting = [task for name, task in tasks.items() if name not in kept]
    if waiting:
        folder = str(job.folder)
        want, take, write = _Want(plans), _Take(folder), _Write(folder, plans)
        run(
            lambda pipeline: (
                pipeline
                | beam.Create(waiting)
                | beam.Reshuffle()
                | "Look up" >> beam.ParDo(want)
                | "By part" >> beam.GroupByKey()
                | "Read" >> beam.ParDo(take)
                | "By file" >> beam.GroupByKey()
                | "Write" >> beam.ParDo(write)
            )
        )
    written = steps.descriptions(job.folder, tasks)
    documents = sum(plan.num_documents for plan in plans.values())
    tokens, before = (sum(file.tokens for file in files.values()) for files in (written, kept))
    job.report(steps.Report("shuffling", documents, documents, "documents", 1.0, tokens, before))
    return written


class _Want(beam.DoFn):
    """Which documents of which parts a final file has: (part, (file, places, documents of the part))."""

    def __init__(self, plans: dict[Split, steps.Gathered]):
        self._plans = plans

    def process(self, task: tuple[Split, int]) -> Iterator[tuple[str, _Wanted]]:
        split, number = task
        plan = self._plans[split]
        ends = np.cumsum([file.documents for file in plan.files])
        places = np.asarray(plan.places(number), np.int64)
        documents = np.asarray([plan.document(place) for place in places.tolist()], np.int64)
        parts = np.searchsorted(ends, documents, side="right")
        for part in np.unique(parts).tolist():
            file, mine = plan.files[part], parts == part
            yield file.name, (f"{split}-{number:05d}", places[mine], documents[mine] - (ends[part] - file.documents))


class _Take(beam.DoFn):
    """Reads a part once, and gives the pieces of its documents to their files: (file, piece)."""

    def __init__(self, folder: str):
        self._folder = folder

    def setup(self) -> None:
        self._tokenizer = load_tokenizer(storage.path(self._folder) / "tokenizer")

    def process(self, wanted: tuple[str, Iterable[_Wanted]]) -> Iterator[tuple[str, _Piece]]:
        name, files = wanted
        parts, size = storage.path(self._folder) / "parts", self._tokenizer.vocab_size
        description, dtype = TokenFile(**storage.read_json(parts / f"{name}.json")), token_dtype(size)
        with _on_this_disk(parts, description, dtype) as local:
            tokens = TokenFiles([(local, description)], dtype, size)
            for file, places, documents in files:
                for place, document in zip(places.tolist(), documents.tolist(), strict=True):
                    for piece in _pieces(tokens, place, document, dtype):
                        yield file, piece


@contextlib.contextmanager
def _on_this_disk(folder: storage.AnyPath, file: TokenFile, dtype: np.dtype) -> Iterator[pathlib.Path]:
    """The folder of a token file; for one in a bucket, of a copy."""
    if not isinstance(folder, storage.StorePath):
        yield folder
        return
    with storage.temporary_folder("prepare") as local:
        for part in file.parts(dtype).values():
            with (folder / part.name).open("rb") as source, (local / part.name).open("wb") as target:
                shutil.copyfileobj(source, target)
        try:
            yield local
        finally:
            close_files()  # or their space would not be free again


def _pieces(tokens: TokenFiles, place: int, document: int, dtype: np.dtype) -> Iterator[_Piece]:
    start, stop = tokens.document(document)
    for number, at in enumerate(range(start, max(stop, start + 1), _PIECE)):
        found = tokens[at : min(at + _PIECE, stop)]
        ids, sizes = found if found.ndim == 2 else (found, np.zeros(0))
        yield place, number, ids.astype(dtype).tobytes(), sizes.astype(SIZE).tobytes()


class _Write(beam.DoFn):
    """Writes a final file from the pieces of its documents."""

    def __init__(self, folder: str, plans: dict[Split, steps.Gathered]):
        self._folder = folder
        self._documents = {name: len(plans[split].places(i)) for name, (split, i) in steps.final_files(plans).items()}

    def setup(self) -> None:
        self._tokenizer = load_tokenizer(storage.path(self._folder) / "tokenizer")

    def process(self, found: tuple[str, Iterable[_Piece]]) -> None:
        name, unordered = found
        pieces = sorted(unordered)
        documents = len({place for place, *_ in pieces})
        if documents != self._documents[name]:
            raise ValueError(f"{name} should have {self._documents[name]} documents, and the runner gave {documents}.")
        dtype = token_dtype(self._tokenizer.vocab_size)
        # Only what is evaluated needs the bytes of each token.
        sized = not self._tokenizer.is_exact and name.startswith("validation")
        write = functools.partial(_write_documents, self._tokenizer, dtype, pieces)
        _written(storage.path(self._folder), name, dtype, write, sized=sized)


def _write_documents(tokenizer: Tokenizer, dtype: np.dtype, pieces: Sequence[_Piece], writer: TokenWriter) -> None:
    for _, document in itertools.groupby(pieces, lambda piece: piece[0]):
        for _, _, content, sizes in document:
            ids = np.frombuffer(content, dtype)
            if sizes or not len(ids):
                writer.write(np.stack([ids.astype(np.int64), np.frombuffer(sizes, SIZE).astype(np.int64)]))
            else:
                writer.write(with_sizes(tokenizer, ids))
        writer.end_document()

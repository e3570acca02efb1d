"""Prepares a data set: tokenizes it once, shuffles its documents, and writes token files with a manifest.

    manifest = prepare(DataConfig(source="jsonl", paths=("corpus/",), tokenizer="bpe:32000"), "prepared/corpus", workers=8)

Each part of the source is tokenized into its own file in `parts/`, in document order. Then the documents are gathered from these
files in random order into the final files. A file is finished when its description (.json) exists, which is written after it, so an
interrupted preparation resumes with the unfinished files. The result depends only on the config, never on the number of workers.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator

from atlasjax import cache, check, storage
from atlasjax.data import manifest as manifest_lib
from atlasjax.data import preparation_steps as steps
from atlasjax.data.config import DataConfig, Split
from atlasjax.data.inputs import open_inputs
from atlasjax.data.manifest import SHARD_TOKENS, Manifest
from atlasjax.data.prepared_copies import upload
from atlasjax.data.token_files import TokenFile, TokenFiles, TokenWriter
from atlasjax.data.tokenizers import load_tokenizer
from atlasjax.data.windows import token_dtype, with_sizes
from atlasjax.data.workers import Task, run_tasks

_GATHERED = 2**22  # tokens copied at once from a long document
_TICK = 2.0  # seconds between reports


def prepare(
    config: DataConfig,
    directory: str | storage.AnyPath,
    *,
    workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    on_report: Callable[[steps.Report], None] | None = None,
) -> Manifest:
    """Tokenize, shuffle and write the documents of a config, or resume an interrupted preparation.

    Train with `DataConfig(source="prepared", paths=(directory,))`.

    Args:
      config: the source, the training/validation split, the tokenizer, the packing, shuffle and seed.
      directory: output folder; created if it does not exist. If it is in a bucket, the data is prepared on the disk of this machine
        (in `cache.folder()`) and then uploaded.
      workers: number of worker processes. 0 works in this process.
      shard_tokens: approximate number of tokens per output file.
      on_report: called regularly with the progress.

    Returns:
      The manifest. If the same config is already prepared, its manifest is returned.

    Raises:
      ValueError: the config cannot be prepared, a document cannot be read, a split is empty, the directory has other content, or
        files of the source were added, removed or changed in size since it was prepared. If no part was finished, or a split is
        empty, nothing stays of what this call made.
      FileNotFoundError: as `load_documents`.
      OSError: a file cannot be written.
      RuntimeError: a worker failed.
    """
    check.require(check.is_integer(workers, 0), "workers", workers, "an integer of at least 0")
    check.require(check.is_integer(shard_tokens, 1), "shard_tokens", shard_tokens, "an integer of at least 1")
    request = steps.request_of(config) | {"shard_tokens": shard_tokens}
    target = storage.expanded(directory)
    if isinstance(target, storage.StorePath):
        return _prepare_in_store(config, target, request, workers, shard_tokens, on_report)
    inputs = None if (target / manifest_lib.FILE).exists() else open_inputs(config)
    _check_folder(target)
    new = [path for path in (target / "lock", target, *target.parents) if not path.exists()]
    target.mkdir(parents=True, exist_ok=True)
    with steps.held(target), _undone_if_bad(target, new):
        if inputs is None or (target / manifest_lib.FILE).exists():  # perhaps since then, by another process
            found = steps.finished(config, target, request)
            steps.clean(target)
            return found
        return _prepared(steps.begin(config, target, inputs, request, on_report), target, workers)


def _prepared(job: steps.Preparation, folder: pathlib.Path, workers: int) -> Manifest:
    """Both stages, and the manifest."""
    written = _tokenize(job, workers)
    try:
        plans = job.plans(written)
    except ValueError:  # only another config can be prepared from this source, and it can have the folder
        steps.clean(folder)
        shutil.rmtree(folder / "tokenizer")
        raise
    return job.finish(_gather(job, plans, workers), plans)


def _prepare_in_store(
    config: DataConfig,
    folder: storage.StorePath,
    request: dict[str, object],
    workers: int,
    shard_tokens: int,
    on_report: Callable[[steps.Report], None] | None,
) -> Manifest:
    """`prepare` on the disk of this machine, and the upload. Both resume; on another machine, the same command begins anew."""
    begun = folder / steps.REQUEST
    if (folder / manifest_lib.FILE).exists():
        return steps.finished(config, folder, request)
    resumes = begun.exists()
    if resumes:
        steps.check_same(folder, storage.read_json(begun), request)
    elif folder.exists():
        raise steps.other_files(folder)
    storage.write_whole(begun, json.dumps(request).encode())  # also shows that the bucket can be written
    wanted = hashlib.sha256(json.dumps([str(folder), request]).encode()).hexdigest()[:24]
    local = cache.folder() / "preparing" / wanted
    try:
        manifest = prepare(config, local, workers=workers, shard_tokens=shard_tokens, on_report=on_report)
    except (ValueError, FileNotFoundError):
        if not resumes and not local.exists():
            begun.unlink()
        raise
    upload(local, folder, manifest)
    begun.unlink()
    shutil.rmtree(local)
    return manifest


def _check_folder(folder: pathlib.Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file; prepared data needs a folder.")
    ours = ("lock", steps.REQUEST, manifest_lib.FILE)
    if folder.exists() and any(folder.iterdir()) and not any((folder / name).exists() for name in ours):
        raise steps.other_files(folder)


@contextlib.contextmanager
def _undone_if_bad(folder: pathlib.Path, new: list[pathlib.Path]) -> Iterator[None]:
    """Removes what was made, and `new`, if the input is bad before a part is finished: the corrected one can have the folder."""
    before = set(folder.iterdir())
    try:
        yield
    except (ValueError, FileNotFoundError):
        if not any((folder / "parts").glob("*.json")):
            for path in set(folder.iterdir()) - before:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            with contextlib.suppress(OSError):  # a folder that is not empty stays, and so do those around it
                for path in new:
                    if path.is_dir():
                        path.rmdir()
                    else:
                        path.unlink()
        raise


# Tokenizing


def _tokenize(job: steps.Preparation, workers: int) -> dict[str, TokenFile]:
    """The token files of all parts, by name."""
    parts = {name: job.inputs.parts[i][number] for name, (i, number) in job.parts.items()}
    sizes, files = (
        {name: part.size for name, part in parts.items()},
        {name: part.files for name, part in parts.items()},
    )
    stage = _Stage("tokenizing", job.folder / "parts", sizes, files, job.dtype.itemsize, job.report)
    stage.run(_encoder, (job.config, job.folder), job.parts, workers)
    return stage.finished


def _encoder(config: DataConfig, folder: pathlib.Path) -> Callable[[tuple[int, int]], TokenFile]:
    tokenizer, inputs = load_tokenizer(folder / "tokenizer"), open_inputs(config)

    def encode(task: tuple[int, int]) -> TokenFile:
        number, part = task
        name, sized = f"{number}-{part:06d}", not tokenizer.is_exact
        with TokenWriter(folder / "parts", name, token_dtype(tokenizer.vocab_size), sized=sized) as writer:
            steps.encode_part(inputs.parts[number][part], tokenizer, steps.separator_of(config), writer)
        return _finish(folder / "parts", writer)

    return encode


def _finish(folder: pathlib.Path, writer: TokenWriter) -> TokenFile:
    file = writer.finished
    storage.write_whole(folder / f"{file.name}.json", json.dumps(dataclasses.asdict(file)).encode())
    return file


# Shuffling


def _gather(job: steps.Preparation, plans: dict[Split, steps.Gathered], workers: int) -> dict[str, TokenFile]:
    """The final files, by name."""
    tasks = steps.final_files(plans)
    sizes = {name: len(plans[split].places(i)) for name, (split, i) in tasks.items()}
    stage = _Stage("shuffling", job.folder, sizes, {}, job.dtype.itemsize, job.report)
    stage.run(_gatherer, (job.folder, plans), tasks, workers)
    return stage.finished


def _gatherer(folder: pathlib.Path, plans: dict[Split, steps.Gathered]) -> Callable[[tuple[Split, int]], TokenFile]:
    tokenizer = load_tokenizer(folder / "tokenizer")
    dtype = token_dtype(tokenizer.vocab_size)
    read = {
        split: TokenFiles([(folder / "parts", file) for file in plan.files], dtype, tokenizer.vocab_size)
        for split, plan in plans.items()
    }

    def gather(task: tuple[Split, int]) -> TokenFile:
        split, number = task
        plan, parts = plans[split], read[split]
        # Only what is evaluated needs the bytes of each token.
        sized = parts.is_sized and split == "validation"
        with TokenWriter(folder, f"{split}-{number:05d}", dtype, sized=sized) as writer:
            for place in plan.places(number):
                start, stop = parts.document(plan.document(place))
                for at in range(start, stop, _GATHERED):
                    tokens = parts[at : min(at + _GATHERED, stop)]
                    writer.write(tokens if tokens.ndim == 2 else with_sizes(tokenizer, tokens))
                writer.end_document()
        return _finish(folder, writer)

    return gather


@dataclasses.dataclass
class _Stage:
    """Files that are written independently, each by the task of the same name.

    Attributes:
      name: name of the stage.
      folder: folder of the files.
      sizes: by name, weight in the finished fraction. These are numbers of documents if there are no `inputs`.
      inputs: by name, the files of the source that it is made from. A file may be an input of several.
      itemsize: bytes per token.
      report: called with the progress.
      finished: finished files, by name.
    """

    name: str
    folder: storage.AnyPath
    sizes: dict[str, int]
    inputs: dict[str, tuple[str, ...]]
    itemsize: int
    report: Callable[[steps.Report], None]
    finished: dict[str, TokenFile] = dataclasses.field(default_factory=dict)

    def run(
        self,
        make: Callable[..., Callable[[Task], TokenFile]],
        arguments: tuple[object, ...],
        tasks: dict[str, Task],
        workers: int,
    ) -> None:
        """Run the unfinished tasks, largest first."""
        self.finished |= steps.descriptions(self.folder, tasks)
        kept = sum(file.tokens for file in self.finished.values())
        waiting = {task: name for name, task in tasks.items() if name not in self.finished}
        order = sorted(waiting, key=lambda task: -self.sizes[waiting[task]])
        reported = 0.0
        for task, file in run_tasks(make, arguments, order, workers):
            if task is not None and file is not None:
                self.finished[waiting[task]] = file
            if time.monotonic() - reported > _TICK or len(self.finished) == len(tasks):
                reported = time.monotonic()
                self.report(self._progress(kept))

    def _progress(self, kept: int) -> steps.Report:
        done, whole = (sum(self.sizes[name] for name in names) for names in (self.finished, self.sizes))
        begun = (self.folder / f"{name}.tokens" for name in self.sizes if name not in self.finished)
        tokens = sum(path.stat().st_size // self.itemsize for path in begun if path.exists())
        tokens += sum(file.tokens for file in self.finished.values())
        fraction = done / max(whole, 1)
        files = {file for each in self.inputs.values() for file in each}
        if not files:
            return steps.Report(self.name, done, whole, "documents", fraction, tokens, kept)
        waiting = {file for name, each in self.inputs.items() if name not in self.finished for file in each}
        return steps.Report(self.name, len(files - waiting), len(files), "files", fraction, tokens, kept)

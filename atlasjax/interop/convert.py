"""Import of a folder of public weights as a run."""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from atlasjax.config_json import to_dict
from atlasjax.data.config import DataConfig
from atlasjax.data.tokenizers import NAMING
from atlasjax.distributed.mesh import MeshConfig, make_mesh
from atlasjax.distributed.sharding import parameter_shardings
from atlasjax.interop import checksums, kept, manifest, names, plain, table, tensors, text_ends, tokenizer_files, unused
from atlasjax.interop.families import family_of
from atlasjax.interop.family import INERT, Family, Sizes, given_dtype
from atlasjax.interop.files import check_file, read_json
from atlasjax.interop.manifest import PEER
from atlasjax.interop.tensors import listed
from atlasjax.nn import ModelConfig, logical_axes
from atlasjax.storage import AnyPath, StoreError, hub, local_path, new_folder, write_whole
from atlasjax.storage.tensors import named
from atlasjax.train import state as state_lib
from atlasjax.train.config import TrainConfig
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.saving.checkpoint import Checkpoints
from atlasjax.train.saving.step_folders import check_path

COPIED = (
    "config.json", "generation_config.json", *tokenizer_files.FILES, "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", tensors.INDEX,
)  # fmt: skip
"""Files beside the tensors that are kept with a run and exported unchanged; so are `tokenizer_files.named_templates`."""
_WANTED = ("*.json", "*.safetensors", checksums.FILE, "*.model", "*.jinja", "merges.txt")  # of a repository
# Files in its folders belong to other models or programs; chat templates may be there.
_NOT_WANTED = ("*/*.json", "*/*.safetensors", "*/*.model", "*/merges.txt", "consolidated*")


@dataclasses.dataclass(frozen=True)
class Converted:
    """The result of an import or an export.

    Attributes:
      family: name of the family; "atlasjax" for the plain form.
      parameters: number of parameters.
      tensors: number of tensors in the peer's files.
      kept: how many of them are no part of the language model (`Family.kept`), or change nothing in it (`Family.unused`): they are
        not used, and exported unchanged.
      notes: lines for people: what was found in the files beside what was expected.
      why: why no public family was exported. Empty for a family.
    """

    family: str
    parameters: int
    tensors: int
    kept: int = 0
    notes: tuple[str, ...] = ()
    why: str = ""


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Weights that can be imported.

    Attributes:
      family: as for `Converted`.
      model: our config.
      shapes: the shapes of our parameters, a nested dict.
      make: makes the array of a parameter, by its path and shape.
      save: writes what an export in the same form needs, into the folder of what was imported.
      kept, notes: as for `Converted`.
    """

    family: str
    model: ModelConfig
    shapes: PyTree
    make: Callable[[str, tuple[int, ...]], np.ndarray]
    save: Callable[[pathlib.Path], None]
    kept: int
    notes: tuple[str, ...]


def import_weights(
    path: str | os.PathLike[str],
    run_dir: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    revision: str | None = None,
) -> Converted:
    """Makes a run of public weights: a folder that `evaluate`, `generate` and `train` take, with a checkpoint of step 0.

    The weights are kept in float32, as all parameters here. The folder appears when it is complete.

    Args:
      path: a local folder with config.json and safetensors, one file or several: public weights, or what `export_weights` wrote. Or
        the name of such a repository on the Hugging Face Hub, "owner/name", whose files are downloaded into the Hub's cache.
      run_dir: the run's folder, a local one that must not exist.
      tokenizer: as `DataConfig.tokenizer`, for weights without a tokenizer beside them. None: tokenizer.json or tokenizer.model.
      dtype: dtype of activations, "float32" or "bfloat16". None: the one in config.json, or else of
        the weights; float32 for float16.
      revision: a branch, tag or commit of the repository. None: the main branch.

    Raises:
      ConfigError: the family or its form is not known here; tensors are unknown, missing, of another shape or dtype; values
        are not finite; a file is missing or damaged, or a pickle; there is no tokenizer; or run_dir exists or has brackets in its
        path; there is no such repository or revision.
      StoreError: the Hub does not answer, and the repository was not downloaded before.
    """
    with user_errors():
        target = local_path(run_dir)
        check_path(target)
        if os.path.lexists(target):
            raise ConfigError(f"run_dir is {str(target)!r}, which exists; give a new folder.")
        source, where = _source(os.fspath(path), revision)
    given = peer_config(source)
    # Before tensors are read, which takes long: a clone without LFS has pointers in the place of all files.
    for name in (*COPIED, *tokenizer_files.named_templates(source)):
        check_file(source / name)
    with tensors.Folder(source) as folder:
        checksums.check(source, folder.metadata)
        read = _plain if plain.is_mine(given) else _of_family
        found = read(given, folder, lambda model: model if dtype is None else dataclasses.replace(model, dtype=dtype))
        model = found.model
        spec, text, definition = tokenizer_files.tokenizer_of(source, tokenizer)
        if text.vocab_size > model.vocab_size:
            raise ConfigError(f"the tokenizer {spec!r} has {text.vocab_size} tokens; the model has {model.vocab_size}.")
        with user_errors():  # generation from the run would refuse what is damaged
            ends = text_ends.find(source, definition, model.vocab_size)
        config = TrainConfig(model=model, data=DataConfig(tokenizer=spec), run_dir=str(target))
        with new_folder(target) as partial:
            text.save(partial / "tokenizer")
            if definition is not None and definition.parent != source:
                tokenizer_files.copy(definition.parent, partial / "tokenizer", NAMING)
            tokenizer_files.copy(source, partial / PEER, (*COPIED, *tokenizer_files.named_templates(source)))
            found.save(partial / PEER)
            _save_run(partial, config, found, text.fingerprint)
        count = len(folder.tensors)
    notes = (*where, *found.notes, text_ends.described(ends))
    return Converted(found.family, sum(x.size for x in jax.tree.leaves(found.shapes)), count, found.kept, notes)


def _save_run(folder: pathlib.Path, config: TrainConfig, found: _Weights, fingerprint: str) -> None:
    """Writes the config of a run, and its checkpoint of step 0. fingerprint: the tokenizer's."""
    write_whole(folder / "config.json", (json.dumps(to_dict(config), indent=2) + "\n").encode())
    state = state_lib.TrainState(_placed(found), None, jax.random.key(config.seed), jnp.zeros((), jnp.int32))
    largest = max(x.nbytes for x in jax.tree.leaves(state.params))
    with Checkpoints(folder / "checkpoints", config.keep, at_a_time=largest + 2**20) as checkpoints:
        checkpoints.save(state, [None], to_dict(config), fingerprint)


def _source(path: str, revision: str | None) -> tuple[pathlib.Path, tuple[str, ...]]:
    """The folder of weights, and a line for people about a download."""
    name = path.removeprefix(hub.SCHEME)
    if name != path:  # a URL may have the revision
        name, _, given = name.partition("@")
        revision = revision or given or None
    if name == path and (os.path.lexists(path) or not hub.is_name(path)):
        if revision is not None:
            raise ConfigError(f"revision is {revision!r}, but {path!r} is a folder; it must be a name, OWNER/NAME.")
        return local_path(path), ()
    if not hub.is_name(name):
        raise ConfigError(f"{path!r} is not the name of a repository; it must be OWNER/NAME.")
    try:
        source = hub.snapshot(name, revision, wanted=_WANTED, but=_NOT_WANTED)
    except StoreError as error:
        raise type(error)(f"there is no folder {path!r} here, and {error}") from None
    if not any(source.glob("*.safetensors")):
        with contextlib.suppress(OSError):
            there = [file for file in hub.files(name, revision) if file.endswith(tensors.PICKLES)]
            if there:
                raise ConfigError(
                    f"{name!r} has no safetensors; {there[0]!r} is a pickle, which can run code. Give a --revision that has them "
                    "(many repositories have one as refs/pr/N), or save it as safetensors."
                )
    return source, (f"files of {name} at revision {source.name} are in {source}",)


def peer_config(folder: AnyPath) -> dict[str, object]:
    if not folder.is_dir():
        what = "is a file; give the folder with it and config.json" if folder.exists() else "does not exist"
        raise ConfigError(f"{str(folder)!r} {what}.")
    file = folder / "config.json"
    if isinstance(file, pathlib.Path):
        check_file(file)
    if not file.is_file():
        raise ConfigError(f"{str(folder)!r} has no config.json.")
    return read_json(file)


def _of_family(
    given: Mapping[str, object], folder: tensors.Folder, changed: Callable[[ModelConfig], ModelConfig]
) -> _Weights:
    """Weights of a public family. changed: what the caller wants otherwise in the config."""
    family = family_of(given)
    try:
        model = changed(_model(family, given, folder))
        shapes = _shapes(family.name, model)
    except ConfigError:  # it names the field
        raise
    except ValueError as error:  # sizes that do not fit together
        raise ConfigError(f"config.json of {family.name}: {error}") from error
    pieces = table.pieces(
        family.table(model, folder.tensors), model, {path: x.shape for path, x in named(shapes).items()}
    )
    renamed = names.canonical(folder.tensors, pieces)
    folder.rename(renamed)
    notes = (*folder.notes, *([names.described(renamed)] if renamed else []), *_inert(given))
    extra = kept.names(folder.tensors, family)
    unused.check(folder, extra, model)
    pieces = _checked(pieces, folder, extra, family)
    own = grouped((piece for piece in pieces if not piece.copy), lambda piece: piece.path)
    read = lambda piece: folder.read_finite(piece.names[0], piece.rows)

    def save(peer: pathlib.Path) -> None:
        manifest.save(peer, family.name, folder)
        kept.save(peer, folder, extra)

    return _Weights(
        family.name, model, shapes, lambda path, shape: table.our_array(shape, own[path], read), save, len(extra),
        (*notes, *kept.described(extra, family)),
    )  # fmt: skip


def _inert(given: Mapping[str, object]) -> Iterator[str]:
    """A line for people about the fields of a config.json that change nothing."""
    inside = given.get("text_config")
    fields = {**given, **(inside if isinstance(inside, dict) else {})}
    found = sorted(name for name in INERT if fields.get(name) is not None)
    if found:
        yield f"fields of config.json that change nothing here: {listed(found)}"


def _plain(
    given: Mapping[str, object], folder: tensors.Folder, changed: Callable[[ModelConfig], ModelConfig]
) -> _Weights:
    """Weights in the plain form."""
    with user_errors():
        model = changed(plain.model_of(given, repr(str(folder.path / "config.json"))))
        plain.check_embedding(folder, model)
        shapes = _shapes(plain.NAME, model)
    plain.check(folder, named(shapes))
    return _Weights(
        plain.NAME, model, shapes, lambda path, _: folder.read_finite(path), lambda _: None, 0, folder.notes
    )


def _model(family: Family, given: Mapping[str, object], folder: tensors.Folder) -> ModelConfig:
    """Our config. Without a dtype in config.json, activations have the dtype of most numbers in the files."""
    if given_dtype(given) is None:
        sizes = collections.Counter[str]()
        for name, tensor in folder.tensors.items():
            if not family.is_extra(name):
                sizes[tensor.dtype] += math.prod(tensor.shape)
        given = {**given, "dtype": "bfloat16" if max(sizes, key=sizes.__getitem__, default="") == "BF16" else "float32"}
    longest = max((size for tensor in folder.tensors.values() for size in tensor.shape), default=0)
    return family.to_ours(given, Sizes(len(folder.tensors), longest))


def _shapes(form: str, model: ModelConfig) -> PyTree:
    """The shapes of our parameters. Raises ConfigError if one has an axis that is no number of a machine."""
    try:
        return state_lib.model_shapes(model)[1]
    except OverflowError:
        raise ConfigError(f"{form}: the sizes in config.json make tensors that are larger than any file.") from None


def _checked(
    pieces: list[table.Piece], folder: tensors.Folder, extra: frozenset[str], family: Family
) -> list[table.Piece]:
    """The pieces with the names that the files have, without missing copies. `extra`: names of tensors without a piece.

    Raises:
      ConfigError: tensors are missing, unknown, of another shape or dtype, or a copy is not what it repeats.
    """
    there, name = folder.tensors, family.name
    found, missing = [], []
    for piece in pieces:
        names = [x for x in piece.names if x in there][:1]
        if names:
            found.append(dataclasses.replace(piece, names=tuple(names)))
        elif not piece.copy:
            missing.append(piece.names[0])
    shapes = table.peer_shapes(found)
    unknown = [x for x in there if x not in shapes and x not in extra]
    if missing:
        has = f" The files have {listed(unknown)}, which it has not." if unknown else ""
        if {*missing} == {"lm_head.weight"}:
            has += " If the embedding is the head, tie_word_embeddings must be true in config.json."
        raise ConfigError(f"{name}: the tensors {listed(dict.fromkeys(missing))} are missing.{has}")
    if unknown:
        raise ConfigError(f"{name} has no tensors {listed(unknown)} in the form that config.json describes.")
    for tensor, shape in shapes.items():
        if there[tensor].shape != shape:
            raise ConfigError(f"{name}: tensor {tensor!r} has shape {there[tensor].shape}, must be {shape}.")
        if there[tensor].dtype not in tensors.DTYPES:
            raise ConfigError(
                f"{name}: tensor {tensor!r} is {there[tensor].dtype}, must be {', '.join(tensors.DTYPES)}."
            )
    main = {piece.path: piece.names[0] for piece in found if not piece.copy}
    for piece in found:
        if piece.copy and not _same(folder, piece.names[0], main[piece.path]):
            raise ConfigError(
                f"{name}: tensor {piece.names[0]!r} should repeat {main[piece.path]!r}, and does not. If it is a head of its own, "
                "tie_word_embeddings must be false in config.json."
            )
    return found


def _same(folder: tensors.Folder, name: str, other: str) -> bool:
    return folder.tensors[name].dtype == folder.tensors[other].dtype and np.array_equal(
        folder.read(name).view(np.uint8), folder.read(other).view(np.uint8)
    )


def grouped(pieces: Iterable[table.Piece], key: Callable[[table.Piece], str]) -> dict[str, list[table.Piece]]:
    groups: dict[str, list[table.Piece]] = {}
    for piece in pieces:
        groups.setdefault(key(piece), []).append(piece)
    return groups


def _placed(found: _Weights) -> PyTree:
    """Our parameters on the local devices. One is made at a time, so the peak is the model and its largest parameter."""
    # Divided over all devices: weights may be larger than one of them.
    mesh = make_mesh(MeshConfig(data=1, fsdp=-1))
    shardings, _ = parameter_shardings(state_lib.pure(logical_axes(found.model)), found.shapes, mesh)
    places = named(shardings)
    arrays = [
        jax.device_put(found.make(path, shape.shape), places[path]) for path, shape in named(found.shapes).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(found.shapes), arrays)

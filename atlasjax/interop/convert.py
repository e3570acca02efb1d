"""Import of a folder of public weights as a run, and export of a run as such a folder."""

import collections
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from atlasjax.config_json import to_dict
from atlasjax.data.config import DataConfig
from atlasjax.data.tokenizers import Tokenizer, make_tokenizer
from atlasjax.distributed.mesh import MeshConfig, make_mesh
from atlasjax.distributed.sharding import parameter_shardings
from atlasjax.interop import fla, kept, mamba, manifest, olmo_hybrid, qwen3_5, rwkv7, table, tensors
from atlasjax.interop.family import Family, Sizes, given_dtype
from atlasjax.interop.files import check_file, read_json
from atlasjax.interop.manifest import PEER
from atlasjax.interop.tensors import listed
from atlasjax.interop.text_ends import text_ends_in
from atlasjax.nn import ModelConfig, logical_axes
from atlasjax.storage import AnyPath, local_path, new_folder, write_whole
from atlasjax.train import state as state_lib
from atlasjax.train.checkpoint import Checkpoints, check_path
from atlasjax.train.config import TrainConfig, run_folder
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.load import load_run
from atlasjax.train.trainable import flat, nested

FAMILIES = (
    mamba.MAMBA2_TRANSFORMERS, mamba.MAMBA2_MAMBA_SSM, mamba.MAMBA_TRANSFORMERS, mamba.MAMBA_MAMBA_SSM,
    fla.GATED_DELTANET, fla.DELTANET, fla.GLA, qwen3_5.QWEN3_5, olmo_hybrid.OLMO_HYBRID, rwkv7.RWKV7,
)  # fmt: skip
"""The families that can be imported and exported. A run that was not imported is exported as the first one that has its layers."""

_COPIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", tensors.INDEX,
)  # fmt: skip
_OWN_TOKENIZERS = {
    "bpe.json": "tokenizer.json",
    "sentencepiece.model": "tokenizer.model",
}  # file of a run → of the peer


@dataclasses.dataclass(frozen=True)
class Converted:
    """What was imported or exported.

    Attributes:
      family: name of the family.
      parameters: number of parameters.
      tensors: number of tensors in the peer's files.
      kept: how many of them are no part of the language model (`Family.kept`): they are not used, and exported unchanged.
    """

    family: str
    parameters: int
    tensors: int
    kept: int = 0


def import_weights(
    path: str | os.PathLike[str],
    run_dir: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> Converted:
    """Makes a run of public weights: a folder that `evaluate`, `generate` and `train` take, with a checkpoint of step 0.

    The weights are kept in float32, as all parameters here. The folder appears when it is complete.

    Args:
      path: a local folder with config.json and safetensors, one file or several with an index.
      run_dir: the run's folder, a local one that must not exist.
      tokenizer: as `DataConfig.tokenizer`, for weights without a tokenizer beside them. None: tokenizer.json or tokenizer.model.
      dtype: dtype of activations, "float32" or "bfloat16". None: that of config.json, or else of
        the weights; float32 for float16.

    Raises:
      ConfigError: the family or its form is not known here; tensors are unknown, missing, of another shape or dtype; values
        are not finite; a file is missing or damaged, or a pickle; there is no tokenizer; or run_dir exists or has brackets in its
        path.
    """
    with user_errors():
        source, target = local_path(path), local_path(run_dir)
        check_path(target)
    given = _peer_config(source)
    for name in _copied(source):
        check_file(source / name)
    family = _family(given)
    with tensors.Folder(source) as folder:
        with user_errors():
            model = _model(family, given, folder)
            model = model if dtype is None else dataclasses.replace(model, dtype=dtype)
            shapes = _shapes(family, model)
        pieces = table.pieces(family.rows(model), model, {p: x.shape for p, x in flat(shapes).items()})
        extra = kept.names(folder.tensors, family.kept)
        pieces = _checked(pieces, folder, extra, family.name)
        spec, text = _tokenizer(source, tokenizer)
        if text.vocab_size > model.vocab_size:
            raise ConfigError(f"the tokenizer {spec!r} has {text.vocab_size} tokens; the model has {model.vocab_size}.")
        with user_errors():
            text_ends_in(source, model.vocab_size)  # generation from the run would refuse what is damaged
        if os.path.lexists(target):
            raise ConfigError(f"run_dir is {str(target)!r}, which exists; give a new folder.")
        config = TrainConfig(model=model, data=DataConfig(tokenizer=spec), run_dir=str(target))
        with new_folder(target) as partial:
            text.save(partial / "tokenizer")
            write_whole(partial / "config.json", (json.dumps(to_dict(config), indent=2) + "\n").encode())
            _copy(source, partial / PEER, _copied(source))
            manifest.save(partial / PEER, family.name, folder)
            kept.save(partial / PEER, folder, extra)
            params = _params(model, shapes, pieces, folder)
            state = state_lib.TrainState(params, None, jax.random.key(config.seed), jnp.zeros((), jnp.int32))
            with Checkpoints(partial / "checkpoints", config.keep) as checkpoints:
                checkpoints.save(state, [None], to_dict(config), text.fingerprint)
    return Converted(family.name, sum(x.size for x in jax.tree.leaves(shapes)), len(folder.tensors), len(extra))


def export_weights(
    run_dir: str | AnyPath, path: str | os.PathLike[str], *, step: int | None = None, ema: bool = False
) -> Converted:
    """Writes the model of a run as public weights.

    A run that was imported is written in the form that it had: the same files, tensor names and dtypes, config.json and tokenizer;
    if it was not trained, the same tensors bit for bit. Any other run is written as one file of float32.

    Args:
      run_dir: the run's folder.
      path: the folder to write, a local one that must not exist.
      step: step of the checkpoint. None: the newest usable one.
      ema: whether to write the moving average of the parameters.

    Raises:
      ConfigError: there is no run; no family has its mixer, the family's form does not have its layers, or it has Memory Caching;
        or path exists.
      CheckpointError: no checkpoint is usable.
    """
    with user_errors():
        target, run = local_path(path), run_folder(run_dir)
    peer = run / PEER
    if os.path.lexists(target):
        raise ConfigError(f"path is {str(target)!r}, which exists; give a new folder.")
    loaded = load_run(run_dir, step, ema=ema)
    model = loaded.config.model
    if model.caching is not None:
        raise ConfigError(
            f"the model in {str(run_dir)!r} has Memory Caching ({model.caching.aggregation}), which no public family has, so it "
            "cannot be exported."
        )
    if model.branch is not None:
        raise ConfigError(
            f"the model in {str(run_dir)!r} has a branch ({model.branch.mixer}), which no public family has, so it cannot be "
            "exported."
        )
    imported = manifest.read(peer, [family.name for family in FAMILIES])
    if imported is None:
        family, given = _form_of(model)
    else:
        family = next(x for x in FAMILIES if x.name == imported["family"])
        given = _peer_config(peer)
        tensors_there = sum(len(content["tensors"]) for content in imported["files"].values())
        _check_form(family, model, given, Sizes(tensors_there))
    params = flat(state_lib.pure(nnx.state(loaded.model, nnx.Param)))
    pieces = table.pieces(family.rows(model), model, {path: x.shape for path, x in params.items()})
    shapes, own = table.peer_shapes(pieces), _by(pieces, lambda piece: piece.names[0])
    first = {name: piece.names[0] for piece in pieces for name in piece.names}
    if imported is None:
        described = {name: "F32" for name, of in own.items() if not of[0].copy}
        files: dict[str, manifest.File] = {tensors.FILE: {"metadata": {"format": "pt"}, "tensors": described}}
    else:
        files = imported["files"]
    extra = kept.names((name for content in files.values() for name in content["tensors"]), family.kept)
    with kept.opened(peer, extra) as others, new_folder(target) as partial:
        beside = {} if others is None else others.tensors
        if imported is not None:
            manifest.check_names(peer, imported, pieces, beside)
        shapes |= {name: tensor.shape for name, tensor in beside.items()}
        for file, content in files.items():
            kinds = {name: (kind, shapes[first.get(name, name)]) for name, kind in content["tensors"].items()}

            def make(name: str, kinds: Mapping[str, tuple[str, tuple[int, ...]]] = kinds) -> np.ndarray:
                if others is not None and name in extra:
                    return others.read(name)
                kind, shape = kinds[name]
                return table.peer_tensor(shape, tensors.DTYPES[kind], own[first[name]], params)

            tensors.write(partial / file, kinds, make, content["metadata"])
        if imported is None:
            write_whole(partial / "config.json", (json.dumps(given, indent=2) + "\n").encode())
            _copy(run / "tokenizer", partial, _OWN_TOKENIZERS)
        else:
            _copy(peer, partial, _copied(peer))
    count = sum(len(content["tensors"]) for content in files.values())
    return Converted(family.name, sum(x.size for x in params.values()), count, len(extra))


def _peer_config(folder: AnyPath) -> dict[str, object]:
    if not folder.is_dir():
        what = "is a file; give the folder with it and config.json" if folder.exists() else "does not exist"
        raise ConfigError(f"{str(folder)!r} {what}.")
    file = folder / "config.json"
    if isinstance(file, pathlib.Path):
        check_file(file)
    if not file.is_file():
        raise ConfigError(f"{str(folder)!r} has no config.json.")
    return read_json(file)


def _family(given: Mapping[str, object]) -> Family:
    for family in FAMILIES:
        if family.is_mine(given):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ConfigError(f"config.json has model_type {given.get('model_type')!r}; the families known here are: {known}.")


def _model(family: Family, given: Mapping[str, object], folder: tensors.Folder) -> ModelConfig:
    """Our config. Without a dtype in config.json, that of most numbers in the files is the dtype of activations."""
    if given_dtype(given) is None:
        sizes = collections.Counter[str]()
        for name, tensor in folder.tensors.items():
            if not name.startswith(family.kept):
                sizes[tensor.dtype] += math.prod(tensor.shape)
        given = {**given, "dtype": "bfloat16" if max(sizes, key=sizes.__getitem__, default="") == "BF16" else "float32"}
    longest = max((size for tensor in folder.tensors.values() for size in tensor.shape), default=0)
    return family.to_ours(given, Sizes(len(folder.tensors), longest))


def _shapes(family: Family, model: ModelConfig) -> PyTree:
    """The shapes of our parameters. Raises ConfigError if one has an axis that is no number of a machine."""
    try:
        return state_lib.model_shapes(model)[1]
    except OverflowError:
        raise ConfigError(
            f"{family.name}: the sizes in config.json make tensors that are larger than any file."
        ) from None


def _form_of(model: ModelConfig) -> tuple[Family, dict[str, object]]:
    """The family of a model that was not imported, and its config.json.

    Raises:
      ConfigError: no family has its mixers, or those that have them lack something else. The message is about the nearest one.
    """
    refused: list[tuple[float, ConfigError]] = []
    for family in FAMILIES:
        if family.to_peer is not None and family.has_layers_of(model):
            given = family.to_peer(model)
            try:
                differences = family.differences(model, given)
            except ConfigError as error:  # config.json cannot say it
                refused.append((math.inf, error))
                continue
            if not differences:
                return family, given
            refused.append((len(differences), _cannot_have(family, differences)))
    if refused:
        raise min(refused, key=lambda found: found[0])[1]
    others: dict[str, set[str]] = {}  # of each family's mixer, those that further layers may have
    for family in FAMILIES:
        others.setdefault(family.mixers[0], set()).update(family.mixers[1:])
    known = ", ".join(
        f"{name} (or with {' and '.join(sorted(more))})" if more else name for name, more in sorted(others.items())
    )
    raise ConfigError(f"no public family has mixer {model.mixer!r}; those that can be exported are {known}.")


def _check_form(family: Family, model: ModelConfig, given: Mapping[str, object], sizes: Sizes) -> None:
    """Raises ConfigError if the form that a config.json describes is not that of the model."""
    differences = family.differences(model, given, sizes)
    if differences:
        raise _cannot_have(family, differences)


def _cannot_have(family: Family, differences: list[str]) -> ConfigError:
    return ConfigError(f"{family.name} cannot have this model: {differences[0]}.")


def _checked(pieces: list[table.Piece], folder: tensors.Folder, extra: frozenset[str], name: str) -> list[table.Piece]:
    """The pieces with the names that the files have, those of missing copies left out. `extra`: names of tensors without a piece.

    Raises:
      ConfigError: tensors are missing, unknown, of another shape or dtype, or a copy is not what it repeats.
    """
    there = folder.tensors
    found, missing = [], []
    for piece in pieces:
        names = [x for x in piece.names if x in there][:1]
        if names:
            found.append(dataclasses.replace(piece, names=tuple(names)))
        elif not piece.copy:
            missing.append(piece.names[0])
    if missing:
        raise ConfigError(f"{name}: the tensors {listed(dict.fromkeys(missing))} are missing.")
    shapes = table.peer_shapes(found)
    unknown = [x for x in there if x not in shapes and x not in extra]
    if unknown:
        raise ConfigError(f"{name} has no tensors {listed(unknown)} in the form that config.json describes.")
    for tensor, shape in shapes.items():
        if there[tensor].shape != shape:
            raise ConfigError(f"{name}: tensor {tensor!r} has shape {there[tensor].shape}, should be {shape}.")
        if there[tensor].dtype not in tensors.DTYPES:
            raise ConfigError(
                f"{name}: tensor {tensor!r} is {there[tensor].dtype}, should be {', '.join(tensors.DTYPES)}."
            )
    main = {piece.path: piece.names[0] for piece in found if not piece.copy}
    for piece in found:
        if piece.copy and not _same(folder, piece.names[0], main[piece.path]):
            raise ConfigError(f"{name}: tensor {piece.names[0]!r} should repeat {main[piece.path]!r}, and does not.")
    return found


def _same(folder: tensors.Folder, name: str, other: str) -> bool:
    return folder.tensors[name].dtype == folder.tensors[other].dtype and np.array_equal(
        folder.read(name).view(np.uint8), folder.read(other).view(np.uint8)
    )


def _by(pieces: Iterable[table.Piece], key: Callable[[table.Piece], str]) -> dict[str, list[table.Piece]]:
    groups: dict[str, list[table.Piece]] = {}
    for piece in pieces:
        groups.setdefault(key(piece), []).append(piece)
    return groups


def _params(model: ModelConfig, shapes: PyTree, pieces: list[table.Piece], folder: tensors.Folder) -> PyTree:
    """Our parameters on the local devices. One is made at a time, so the peak is the model and its largest parameter."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=-1))
    shardings, _ = parameter_shardings(state_lib.pure(logical_axes(model)), shapes, mesh)
    own = _by((piece for piece in pieces if not piece.copy), lambda piece: piece.path)
    places = flat(shardings)
    read = lambda piece: folder.read_finite(piece.names[0], piece.rows)
    return nested(
        {
            path: jax.device_put(table.our_array(shape.shape, own[path], read), places[path])
            for path, shape in flat(shapes).items()
        }
    )


def _tokenizer(source: pathlib.Path, spec: str | None) -> tuple[str, Tokenizer]:
    """The tokenizer and its name as `DataConfig.tokenizer`."""
    json_file, model_file = source / "tokenizer.json", source / "tokenizer.model"
    if spec is not None:
        if spec.partition(":")[2].isdecimal():
            raise ConfigError(
                f"tokenizer is {spec!r}, which would be trained; give the one that the weights were trained with."
            )
        specs = [spec]
    else:
        specs = [f"bpe:{json_file}"] * json_file.is_file() + [f"sentencepiece:{model_file}"] * model_file.is_file()
    if not specs:
        raise ConfigError(f"{str(source)!r} has neither tokenizer.json nor tokenizer.model; give --tokenizer.")
    reasons = []
    for one in specs:
        try:
            return one, make_tokenizer(DataConfig(tokenizer=one))
        except (ValueError, FileNotFoundError) as error:
            reasons.append(str(error))
    raise ConfigError(f"{reasons[0]} Give another one with --tokenizer.")


def _copied(folder: AnyPath) -> tuple[str, ...]:
    """Names of files that a run keeps of imported weights: `_COPIED`, and chat templates with names of their own."""
    more = folder / "additional_chat_templates"
    names = sorted(file.name for file in more.iterdir() if file.name.endswith(".jinja")) if more.is_dir() else []
    return (*_COPIED, *(f"{more.name}/{name}" for name in names))


def _copy(source: AnyPath, target: pathlib.Path, names: Iterable[str] | Mapping[str, str]) -> None:
    """Copies the files that are there; a mapping gives them other names."""
    target.mkdir(exist_ok=True)
    for name in names:
        if (source / name).is_file():
            renamed = names[name] if isinstance(names, Mapping) else name
            (target / renamed).parent.mkdir(exist_ok=True)
            write_whole(target / renamed, (source / name).read_bytes())

"""Export of a run as a folder of public weights."""

import json
import math
import os
import pathlib
from collections.abc import Mapping

import numpy as np
from flax import nnx

from atlasjax import storage
from atlasjax.interop import checksums, kept, manifest, plain, table, tensors, tokenizer_files
from atlasjax.interop.convert import COPIED, Converted, grouped, peer_config
from atlasjax.interop.families import FAMILIES
from atlasjax.interop.family import Family, Sizes
from atlasjax.interop.manifest import PEER
from atlasjax.interop.text_ends import TextEnds, text_ends
from atlasjax.nn import ModelConfig
from atlasjax.storage import AnyPath, local_path, new_folder, write_whole
from atlasjax.storage.tensors import KINDS, named
from atlasjax.train import state as state_lib
from atlasjax.train.config import run_folder
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.load import LoadedRun, load_run


def export_weights(
    run_dir: str | AnyPath, path: str | os.PathLike[str], *, step: int | None = None, ema: bool = False
) -> Converted:
    """Writes the model of a run as public weights.

    A run that was imported is written in the form that it had: the same files, tensor names and dtypes, config.json and tokenizer;
    if it was not trained, the same tensors bit for bit. Any other run is written as one file of float32, with its checksum, its
    tokenizer, and the ids of the tokens for the beginning and the end of texts and for padding, null where it has none: in the form
    of a public family if one has its layers, else in the plain form, the names and the config of this library, which
    `import_weights` reads.

    Args:
      run_dir: the run's folder.
      path: the folder to write, a local one that must not exist.
      step: step of the checkpoint. None: the newest usable one.
      ema: whether to write the moving average of the parameters.

    Raises:
      ConfigError: there is no run; an imported one no longer has the form that it had; or path exists.
      CheckpointError: no checkpoint is usable.
    """
    with user_errors():
        target, run = local_path(path), run_folder(run_dir)
    if os.path.lexists(target):
        raise ConfigError(f"path is {str(target)!r}, which exists; give a new folder.")
    loaded = load_run(run_dir, step, ema=ema)
    imported = manifest.read(run / PEER, [family.name for family in FAMILIES])
    if imported is None:
        return _export_own(run, loaded, target)
    return _export_imported(run / PEER, imported, loaded, target)


def _export_own(run: AnyPath, loaded: LoadedRun, target: pathlib.Path) -> Converted:
    """Writes a run that has no form yet."""
    model, params = loaded.config.model, state_lib.pure(nnx.state(loaded.model, nnx.Param))
    with user_errors():
        ends = text_ends(run)
    own, why = named(params), ""
    settings: Mapping[str, object] = {}
    try:
        family, given = _form_of(model)
    except ConfigError as error:
        name, given, why = plain.NAME, plain.config(model), str(error)
        leaves = named(params)
        kinds = {leaf: (KINDS[x.dtype], x.shape) for leaf, x in leaves.items()}
        make = lambda leaf: np.asarray(leaves[leaf])
    else:
        name, settings = family.name, family.generation
        pieces = table.pieces(family.rows(model), model, {path: x.shape for path, x in own.items()})
        by_name, shapes = grouped(pieces, lambda piece: piece.names[0]), table.peer_shapes(pieces)
        kinds = {tensor: ("F32", shapes[tensor]) for tensor, of in by_name.items() if not of[0].copy}
        make = lambda tensor: table.peer_tensor(shapes[tensor], tensors.DTYPES["F32"], by_name[tensor], own)
    ids = _ids(ends)
    generation = storage.read_object(run / PEER / "generation_config.json")
    with new_folder(target) as partial:
        tensors.write(partial / tensors.FILE, kinds, make, {"format": "pt"})
        checksums.save(partial, [tensors.FILE])
        for file, content in (
            ("config.json", given | ids),
            ("generation_config.json", {**settings, **generation, **ids}),
        ):
            write_whole(partial / file, (json.dumps(content, indent=2) + "\n").encode())
        tokenizer_files.write(partial, run, loaded.tokenizer, ends)
    return Converted(name, sum(x.size for x in own.values()), len(kinds), why=why)


def _ids(ends: TextEnds) -> dict[str, object]:
    """The ids in config.json. Without them a peer takes the ids of its class, which are ordinary tokens here."""
    end = ends.ends[0] if len(ends.ends) == 1 else list(ends.ends) or None
    return {"bos_token_id": ends.begin, "eos_token_id": end, "pad_token_id": ends.pad}


def _export_imported(peer: AnyPath, imported: manifest.Manifest, loaded: LoadedRun, target: pathlib.Path) -> Converted:
    """Writes a run in the form that it was imported in."""
    model, files, renamed = loaded.config.model, imported["files"], imported["renamed"]
    _check_exportable(model)
    family = next(x for x in FAMILIES if x.name == imported["family"])
    given = peer_config(peer)
    _check_form(family, model, given, Sizes(sum(len(content["tensors"]) for content in files.values())))
    params = named(state_lib.pure(nnx.state(loaded.model, nnx.Param)))
    stored = [name for content in files.values() for name in content["tensors"]]
    pieces = table.pieces(family.table(model, stored), model, {path: x.shape for path, x in params.items()})
    shapes, own = table.peer_shapes(pieces), grouped(pieces, lambda piece: piece.names[0])
    first = {name: piece.names[0] for piece in pieces for name in piece.names}
    extra = kept.names((renamed.get(name, name) for name in stored), family)
    with kept.opened(peer, extra) as others, new_folder(target) as partial:
        beside = {} if others is None else others.tensors
        manifest.check_names(peer, imported, pieces, beside)
        shapes |= {name: tensor.shape for name, tensor in beside.items()}
        for file, content in files.items():
            names = {name: renamed.get(name, name) for name in content["tensors"]}
            kinds = {
                name: (kind, shapes[first.get(names[name], names[name])]) for name, kind in content["tensors"].items()
            }

            # The defaults bind the names of this file: the next turn of the loop has others.
            def make(
                name: str,
                kinds: Mapping[str, tuple[str, tuple[int, ...]]] = kinds,
                names: Mapping[str, str] = names,
            ) -> np.ndarray:
                if others is not None and names[name] in extra:
                    return others.read(names[name])
                kind, shape = kinds[name]
                return table.peer_tensor(shape, tensors.DTYPES[kind], own[first[names[name]]], params)

            tensors.write(partial / file, kinds, make, content["metadata"])
        tokenizer_files.copy(peer, partial, (*COPIED, *tokenizer_files.named_templates(peer)))
    return Converted(family.name, sum(x.size for x in params.values()), len(stored), len(extra))


def _check_exportable(model: ModelConfig) -> None:
    """Raises ConfigError for what no public family has beside its layers."""
    for what, found in (
        ("Memory Caching", model.caching and model.caching.aggregation),
        ("a branch", model.branch and model.branch.mixer),
    ):
        if found:
            raise ConfigError(f"the model has {what} ({found}), which no public family has.")


def _form_of(model: ModelConfig) -> tuple[Family, dict[str, object]]:
    """The family of a model that was not imported, and its config.json.

    Raises:
      ConfigError: no family has its mixers, or those that have them lack something else. The message is about the nearest one.
    """
    _check_exportable(model)
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
    raise ConfigError(f"no public family has mixer {model.mixer!r}; families have {known}.")


def _check_form(family: Family, model: ModelConfig, given: Mapping[str, object], sizes: Sizes) -> None:
    """Raises ConfigError if the form that a config.json describes is not the form of the model."""
    differences = family.differences(model, given, sizes)
    if differences:
        raise _cannot_have(family, differences)


def _cannot_have(family: Family, differences: list[str]) -> ConfigError:
    return ConfigError(f"{family.name} cannot have this model: {differences[0]}.")

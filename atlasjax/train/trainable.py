"""Which parameters a run trains. The others are frozen: no gradient, no optimizer state, the same bits after training."""

import difflib
import math
import re
from collections.abc import Callable, Mapping

import jax
from jaxtyping import PyTree

from atlasjax.storage.tensors import named

_MOST_PATHS = 60  # a message lists at most this many


def trainable_mask(pattern: str | None, params: PyTree) -> PyTree | None:
    """Which parameters train.

    Args:
      pattern: a regular expression that is searched for in the dotted path of each parameter, such as
        "layers.mixer.inputs.linear.kernel"; those in which it is found train. None: all.
      params: nested dict of the parameters or their shapes.

    Returns:
      The same nested dict of bools. None if all parameters train.

    Raises:
      ValueError: no parameter's path has the pattern. The message lists the paths.
    """
    if pattern is None:
        return None
    paths = list(named(params))
    chosen = [path for path in paths if re.search(pattern, path)]
    if chosen:
        return None if chosen == paths else marked(params, set(chosen).__contains__)
    words = {word for path in paths for word in (path, *path.split("."))}
    close = difflib.get_close_matches(pattern, words, n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    more = ", …" if len(paths) > _MOST_PATHS else ""
    raise ValueError(
        f"optimizer.trainable is {pattern!r}, which is found in no parameter's path.{hint} The paths are "
        f"{', '.join(paths[:_MOST_PATHS])}{more}."
    )


def marked(tree: PyTree, chosen: Callable[[str], bool], prefix: str = "") -> PyTree:
    """The same nested dict of bools: what `chosen` says of each dotted path."""
    return {
        name: marked(part, chosen, f"{prefix}{name}.") if isinstance(part, Mapping) else chosen(f"{prefix}{name}")
        for name, part in tree.items()
    }


def select(tree: PyTree, mask: PyTree | None) -> PyTree:
    """The part of a nested dict whose entries in `mask` are True; all of it without a mask.

    Args:
      tree: of parameters, or of anything that there is for each of them.
      mask: from `trainable_mask`.
    """
    if mask is None:
        return tree
    found = {}
    for name, chosen in mask.items():
        if isinstance(chosen, Mapping):
            if part := select(tree[name], chosen):
                found[name] = part
        elif chosen:
            found[name] = tree[name]
    return found


def replaced(params: PyTree, others: PyTree) -> PyTree:
    """A nested dict with the entries of another one in their places, or added."""
    if not (isinstance(params, Mapping) and isinstance(others, Mapping)):
        return others
    return {**params, **{name: replaced(params[name], x) if name in params else x for name, x in others.items()}}


def counted(params: PyTree, mask: PyTree | None) -> tuple[int, int]:
    """Returns (number of parameters that train, number of parameters)."""
    size = lambda tree: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
    return size(select(params, mask)), size(params)

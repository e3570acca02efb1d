"""Names of tensors in saves of a wrapped model, or of a part of one."""

import collections
import functools
from collections.abc import Callable, Collection, Iterable

from atlasjax.interop.table import Piece

# Parts that wrappers add to the names of parameters: data parallelism, torch.compile, FSDP, activation checkpointing.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def canonical(stored: Iterable[str], pieces: Iterable[Piece]) -> dict[str, str]:
    """Name in the files → name of the family, for all tensors; {} if the files already have the names of the family.

    Tried are the names without the parts of wrappers, and then also without a first part that all have ("model." of a training
    framework), or with one that they lack (a save of the model without its head).

    Args:
      stored: the names in the files.
      pieces: of the family's tensors.
    """
    wanted = {name for piece in pieces for name in piece.names}
    bare = {name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in stored}
    first = {name.partition(".")[0] for name in bare.values()}
    changes: list[Callable[[str], str]] = [lambda name: name]
    if len(first) == 1 and all("." in name for name in bare.values()):
        changes.append(lambda name: name.partition(".")[2])
    heads = {name for name in wanted if name.startswith("lm_head.")}
    for beginning in sorted({name.partition(".")[0] for name in wanted - heads}):
        changes.append(functools.partial(_begun, beginning, heads))
    tried = [{name: change(one) for name, one in bare.items()} for change in changes]
    distinct = [names for names in tried if len({*names.values()}) == len(names)]
    best = max(distinct, key=lambda names: len(wanted.intersection(names.values())), default={})
    same = len(wanted.intersection(bare))
    return best if len(wanted.intersection(best.values())) > same else {}


def _begun(beginning: str, heads: Collection[str], name: str) -> str:
    return name if name in heads else f"{beginning}.{name}"


def described(renamed: dict[str, str]) -> str:
    """One line for people about what `canonical` found."""
    parts = collections.Counter[str]()
    for name, other in renamed.items():
        parts.update(collections.Counter(name.split(".")) - collections.Counter(other.split(".")))
    lacking = {other.partition(".")[0] for name, other in renamed.items() if len(other) > len(name)}
    found = [f"have {', '.join(repr(f'{part}.') for part in sorted(parts))}"] if parts else []
    found += [f"lack {', '.join(repr(f'{part}.') for part in sorted(lacking))}"] if lacking else []
    name, other = next((name, other) for name, other in renamed.items() if name != other)
    return f"names of tensors {' and '.join(found)}, as in saves of a wrapped model: {name!r} is read as {other!r}"

"""The table of a family: which part of the peer's tensors is which part of our parameters. It serves both directions."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType

import jax
import numpy as np

from atlasjax.interop import layout
from atlasjax.nn import ModelConfig

Index = tuple[int | slice | EllipsisType, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
      peer: name of the peer's tensor; "{n}" stands for the number of the layer. Several names come from different versions of
        the peer give the same tensor, the newest first.
      ours: path of our parameter, as in the nested dict of the parameters; those of a layer start with "layers.", and the row
        is about one layer.
      pattern: how the axes correspond, see `layout`.
      rows: start and end of the part of the peer's tensor, on its first axis. None: the whole tensor.
      part: index of the part of our array. Empty: the whole array.
      copy: the tensor repeats a parameter that another row has, and may be missing.
      first: number of the first layer that has the tensor. Our parameter of the layers before it has no effect and becomes zero.
      mixers: names of the mixers whose layers have the tensor. None: all layers.
      network: kind of the feed-forward network of the layers that have the tensor, as in `ModelConfig.ffns`. None: all layers.
      numbers: for each of our layers, the number that takes the place of "{n}", or None if the layer has no such tensor. None: the
        layer's own number.
    """

    peer: str | tuple[str, ...]
    ours: str
    pattern: str
    rows: tuple[int, int] | None = None
    part: Index = ()
    copy: bool = False
    first: int = 0
    mixers: tuple[str, ...] | None = None
    network: str | None = None
    numbers: tuple[int | None, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A row of one layer: `names` of the peer's tensor, path and index of our array, the shape of that part of our array, and
    `peer_shape`, the shape of the part of the peer's tensor."""

    names: tuple[str, ...]
    path: str
    index: Index
    shape: tuple[int, ...]
    pattern: str
    rows: tuple[int, int] | None
    copy: bool

    @property
    def peer_shape(self) -> tuple[int, ...]:
        return layout.peer_shape(self.pattern, self.shape)


def pieces(rows: Iterable[Row], config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[Piece]:
    """The rows of all layers.

    Args:
      rows: the table.
      config: our model.
      shapes: path of each of our parameters → its shape.

    Raises:
      ValueError: the rows do not cover every parameter exactly once, which is a mistake in the table.
    """
    found = []
    covered: dict[str, int] = dict.fromkeys(shapes, 0)
    for row in rows:
        names = (row.peer,) if isinstance(row.peer, str) else row.peer
        for path, layer, n in _places(row, config):
            index = (*layer, *row.part)
            # The shape of a part, from an array of that shape which takes no memory.
            shape = np.broadcast_to(np.empty(()), shapes[path])[index].shape
            covered[path] += 0 if row.copy else math.prod(shape)
            if n < row.first:
                continue
            found.append(
                Piece(tuple(x.format(n=n) for x in names), path, index, shape, row.pattern, row.rows, row.copy)
            )
    wrong = [path for path, size in covered.items() if size != math.prod(shapes[path])]
    if wrong:
        raise ValueError(f"the table does not cover {', '.join(wrong)} exactly.")
    return found


def _places(row: Row, config: ModelConfig) -> Iterator[tuple[str, Index, int]]:
    """(path, index of the layer in the stacked array, the peer's number of the layer) for each layer that has the row; once for a
    path outside the layers."""
    if not row.ours.startswith("layers."):
        yield row.ours, (), 0
        return
    period = len(config.pattern)
    for n in range(config.num_layers):
        number = n if row.numbers is None else row.numbers[n]
        has_mixer = row.mixers is None or config.pattern[n % period] in row.mixers
        has_network = row.network is None or config.ffns[n % period] == row.network
        if number is not None and has_mixer and has_network:
            inside = "layers." if period == 1 else f"layers.layer_{n % period}."
            yield inside + row.ours.removeprefix("layers."), (n // period,), number


def peer_shapes(found: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    """First name of each of the peer's tensors → its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in found:
        shape = piece.peer_shape
        if piece.rows is not None:
            shape = (max(piece.rows[1], shapes.get(piece.names[0], (0,))[0]), *shape[1:])
        shapes[piece.names[0]] = shape
    return shapes


def our_array(shape: tuple[int, ...], own: Iterable[Piece], read: Callable[[Piece], np.ndarray]) -> np.ndarray:
    """One of our parameters, float32.

    Args:
      shape: its shape.
      own: its pieces.
      read: gives the part of the peer's tensor that belongs to a piece.
    """
    array = np.zeros(shape, np.float32)  # what no layer has stays zero
    for piece in own:
        array[piece.index] = layout.to_ours(piece.pattern, read(piece), piece.shape)
    return array


def peer_tensor(
    shape: tuple[int, ...], dtype: np.dtype, own: Iterable[Piece], params: Mapping[str, jax.Array]
) -> np.ndarray:
    """One of the peer's tensors.

    Args:
      shape, dtype: of the tensor.
      own: its pieces.
      params: path → our array.
    """
    tensor = np.empty(shape, dtype)
    for piece in own:
        part = np.asarray(params[piece.path][piece.index])
        start, end = piece.rows or (0, shape[0])
        tensor[start:end] = layout.to_peer(piece.pattern, part).astype(dtype)
    return tensor

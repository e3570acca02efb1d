"""Orders of what is read, known at every place without anything in memory: shuffled in every epoch, mixed by weights."""

from collections.abc import Sequence

import grain

_UNITS = 2**20  # the sum of the weights, about


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights in whole numbers, at least 1, with a sum of about a million."""
    return tuple(max(1, round(_UNITS * weight / sum(weights))) for weight in weights)


def pick(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """Element `index` of a mixture of endless sequences.

    The first sequence has floor(n w / sum of the weights) of the first n elements, and so on for the others among what is left.

    Returns:
      The number of the sequence, and the index in it.
    """
    rest = sum(weights)
    for number, weight in enumerate(weights):
        before = index * weight // rest
        if (index + 1) * weight // rest > before:
            return number, before
        index, rest = index - before, rest - weight
    raise ValueError(f"weights is {weights}; it should be positive whole numbers.")


class Mixed(grain.MapDataset):
    """Elements of several datasets, each repeated without end, in proportion to whole weights."""

    def __init__(self, parents: Sequence[grain.MapDataset], weights: Sequence[int], length: int):
        super().__init__(parents)
        self._weights, self._length = weights, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        number, place = pick(index, self._weights)
        return self._parents[number][place]


class Order:
    """Numbers of documents of several sets, in the order in which they are read.

    Args:
      counts: number of documents of each set. They are numbered through.
      weights: whole weights of the sets; None reads them as one.
      seed: of the shuffling, another one in each epoch. None keeps the order.
      repeat: whether the order goes on after one epoch.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[int] | None, seed: int | None, *, repeat: bool):
        self._counts = tuple(counts) if weights is not None else (sum(counts),)
        self._weights, self._seed, self._repeat = weights, seed, repeat

    def __getitem__(self, index: int) -> int | None:
        """The number of the document at a place; None after the last."""
        which, place = (0, index) if self._weights is None else pick(index, self._weights)
        count = self._counts[which]
        epoch, place = divmod(place, count)
        if epoch and not self._repeat:
            return None
        if self._seed is not None:
            seed = (self._seed + epoch) % 2**32
            place = grain.experimental.index_shuffle(place, max_index=count - 1, seed=seed, rounds=4)
        return sum(self._counts[:which]) + place

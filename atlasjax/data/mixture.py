"""Read orders, shuffled in every epoch and mixed by weights. Any position can be computed without storing the order."""

from collections.abc import Sequence

import grain

_UNITS = 2**20  # approximate sum of the weights


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Scale weights to integers of at least 1 with a sum of about a million."""
    return tuple(max(1, round(_UNITS * weight / sum(weights))) for weight in weights)


def pick(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """Find element `index` of a mixture of endless sequences.

    The first sequence gives floor(n w / sum of the weights) of the first n elements. The others share the rest in the same way.

    Returns:
      The index of the sequence, and the index within it.
    """
    rest = sum(weights)
    for number, weight in enumerate(weights):
        before = index * weight // rest
        if (index + 1) * weight // rest > before:
            return number, before
        index, rest = index - before, rest - weight
    raise ValueError(f"weights is {weights}; it must be positive integers.")


class Mixed(grain.MapDataset):
    """Elements of several endlessly repeated datasets, in proportion to integer weights."""

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
    """Document indices of several sets, in reading order.

    Args:
      counts: number of documents of each set. Indices run through all sets.
      weights: integer weights of the sets. None reads them as one set.
      seed: shuffling seed; each epoch is shuffled differently. None keeps the order.
      repeat: whether to continue after one epoch.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[int] | None, seed: int | None, *, repeat: bool):
        self._counts = tuple(counts) if weights is not None else (sum(counts),)
        self._weights, self._seed, self._repeat = weights, seed, repeat

    def __getitem__(self, index: int) -> int | None:
        """The document index at a position, or None after the last."""
        which, place = (0, index) if self._weights is None else pick(index, self._weights)
        count = self._counts[which]
        epoch, place = divmod(place, count)
        if epoch and not self._repeat:
            return None
        if self._seed is not None:
            seed = (self._seed + epoch) % 2**32  # it takes 32 bits; an epoch may go beyond them
            place = grain.experimental.index_shuffle(place, max_index=count - 1, seed=seed, rounds=4)
        return sum(self._counts[:which]) + place

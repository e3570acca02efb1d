"""Checks of the arguments of log-linear attention."""

from atlasjax import check
from atlasjax.mixers.log_linear.levels import num_levels
from atlasjax.mixers.log_linear.state import LogLinearState
from atlasjax.mixers.shapes import check_shapes

_AXES = {
    "q": "batch time heads key_dim",
    "k": "batch time heads key_dim",
    "v": "batch time heads value_dim",
    "weights": "batch time heads levels",
    "retention": "batch time heads",
    "connector": "batch time heads key_dim",
    "keys": "batch time heads key_dim",
}
_STATE_AXES = {
    "state.states": "batch heads state_levels value_dim key_dim",
    "state.key_sums": "batch heads state_levels key_dim",
    "state.position": "batch",
}
_TOKEN_AXES = {name: axes.replace(" time", "") for name, axes in _AXES.items()}


def check_whole(where: str, q: object, k: object, v: object, weights: object, retention: object) -> None:
    """Raises TypeError or ValueError for invalid arguments of whole sequences."""
    sizes = check_shapes(where, _AXES, optional=("retention",), q=q, k=k, v=v, weights=weights, retention=retention)
    _check_levels(where, sizes, num_levels(sizes["time"]), f"{sizes['time']} tokens")


def check_segment_weights(where: str, connector: object, keys: object) -> None:
    """Raises TypeError or ValueError for invalid arguments of `segment_weights`."""
    check_shapes(where, _AXES, connector=connector, keys=keys)


def check_stream(
    where: str, state: object, q: object, k: object, v: object, weights: object, retention: object, connector: object, *,
    time: bool,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError for invalid arguments of a stream. time: whether its arrays have an axis of time."""
    check.instance(where, "state", state, LogLinearState)
    if (weights is None) == (connector is None):
        raise ValueError(f"{where}: give either weights or connector.")
    sizes = check_shapes(
        where, (_AXES if time else _TOKEN_AXES) | _STATE_AXES, optional=("weights", "retention", "connector"),
        integers=("state.position",), q=q, k=k, v=v, weights=weights, retention=retention, connector=connector, state=state,
    )  # fmt: skip
    if weights is not None:
        _check_levels(where, sizes, sizes["state_levels"], "this state")


def _check_levels(where: str, sizes: dict[str, int], needed: int, what: str) -> None:
    if sizes["levels"] < needed:
        lead = [sizes[name] for name in ("batch", "time", "heads") if name in sizes]
        raise ValueError(
            f"{where}: weights has shape {(*lead, sizes['levels'])}, must be {[*lead, needed]} or more levels for {what}."
        )

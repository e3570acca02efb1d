"""The backends of `memory.scan` in one ordered registry: the rule's XLA engine, its definition, and kernels for a `MemoryRule`.

Each backend reports which calls it does not support, and where it is preferred to the XLA engine. `implementation` selects one by
name or as "package.module:object". None takes, on each platform, the first registered backend that is preferred there and supports
the call, otherwise "xla". On the platform of this machine's device, a choice of `atlasjax tune` decides instead (`tuned`). A
platform may have several backends.
"""

from typing import Any, Protocol

import jax
from jaxtyping import PyTree

from atlasjax.memory import tuned
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Gates
from atlasjax.memory.rule import Params, Rule, State
from atlasjax.memory.tokens import Tokens
from atlasjax.names import resolve


class Backend(Protocol):
    """A way to run `memory.scan`. Register an instance with `register_backend`.

    Attributes:
      name: its name in `implementation`.
      platform: "cpu", "cuda", "rocm" or "tpu". None means any.
      is_partitioned: whether XLA can partition it over the devices of a mesh. It cannot partition a kernel, which runs on one
        device or inside `shard_map` (`memory.Partition`).
    """

    @property
    def name(self) -> str: ...

    @property
    def platform(self) -> str | None: ...

    @property
    def is_partitioned(self) -> bool: ...

    def unsupported(
        self, rule: MemoryRule, params: MemoryParams, state: MemoryState | None, q: jax.Array, packed: bool
    ) -> str | None:
        """The reason why this backend cannot run a call, with the relevant shapes, or None if it can.

        Args:
          rule, params, state: as in `memory.scan`.
          q: [batch, time, heads, key_dim].
          packed: whether there are segment ids.
        """

    def is_preferred(self, rule: MemoryRule, q: jax.Array, v: jax.Array) -> bool:
        """Whether `implementation=None` should take this backend on its platform, for example because it was measured as faster."""

    def scan(
        self,
        rule: MemoryRule,
        params: MemoryParams,
        state: MemoryState | None,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        gates: Gates,
        segment_ids: jax.Array | None,
        max_segments: int | None,
    ) -> tuple[jax.Array, MemoryState]:
        """The recurrence over a sequence. Arguments as in `memory.scan`, already checked."""


class _Everywhere:
    platform: str | None = None
    is_partitioned = True

    def unsupported(self, rule: object, params: object, state: object, q: object, packed: bool) -> str | None:
        return None

    def is_preferred(self, rule: object, q: object, v: object) -> bool:
        return False


class _XLA(_Everywhere):
    name = "xla"

    def scan(
        self, rule: Rule[Params, State], params: Params, state: State | None, *call: Any
    ) -> tuple[jax.Array, State]:
        return rule.scan(params, state, *call)


class _Reference(_Everywhere):
    name = "reference"

    def scan(
        self, rule: Rule[Params, State], params: Params, state: State | None, *call: Any
    ) -> tuple[jax.Array, State]:
        return rule.reference(params, state, *call[:-1])  # without max_segments


BACKENDS: dict[str, Backend] = {"xla": _XLA(), "reference": _Reference()}


def register_backend(backend: Backend) -> None:
    """Adds a backend at the end of the registry.

    Raises:
      ValueError: the name is already registered, or a member of `Backend` is missing.
    """
    _check("register_backend", backend)
    if backend.name in BACKENDS:
        raise ValueError(f"register_backend: the name {backend.name!r} is already registered.")
    BACKENDS[backend.name] = backend


def backend_of(implementation: str, kind: str = "implementation") -> Backend:
    """The backend with a given name. `kind` is what the name is called in messages.

    Raises:
      ValueError: there is none, and the message suggests the nearest name; or what "package.module:object" names is no backend.
    """
    backend: Backend = resolve(kind, implementation, BACKENDS)
    if implementation not in BACKENDS:
        _check(f"{kind}={implementation!r}", backend)
    return backend


def _check(where: str, backend: object) -> None:
    """Refuses what is no backend: a class, or an object without one of the members. Calls nothing."""
    if isinstance(backend, type):
        raise ValueError(f"{where}: {backend.__name__} is a class; give an instance, {backend.__name__}().")
    parts = ("name", "platform", "is_partitioned", "unsupported", "is_preferred", "scan")
    missing = [part for part in parts if not hasattr(backend, part)]
    if missing:
        raise ValueError(f"{where}: {type(backend).__name__} has no {', '.join(missing)}; see memory.Backend.")
    odd = [part for part in ("unsupported", "is_preferred", "scan") if not callable(getattr(backend, part))]
    if odd:
        raise ValueError(f"{where}: {', '.join(odd)} of {type(backend).__name__} cannot be called; see memory.Backend.")


def needs_partition(implementation: str | None, rule: Any, q: jax.Array, v: jax.Array) -> bool:
    """Whether a call may run a backend that XLA cannot partition over the devices of a mesh. Arguments as in `memory.scan`."""
    if implementation is not None:
        return not backend_of(implementation).is_partitioned
    return rule.has_kernels and any(not backend.is_partitioned for backend in _preferred(rule, q, v))


def _preferred(rule: Any, q: jax.Array, v: jax.Array) -> list[Backend]:
    """The backends that a call with `implementation=None` may take in place of "xla", each on its platform.

    What was measured on this machine decides for its platform, where the backends themselves do not.
    """
    measured = tuned.choice_for(rule, q, v)
    here = None if measured is None else tuned.platform()

    def is_chosen(backend: Backend) -> bool:
        assert measured is not None
        return backend.name == measured.implementation and tuned.own_sources(backend) == measured.backend

    return [
        backend
        for backend in BACKENDS.values()
        if backend.platform is not None
        and (is_chosen(backend) if backend.platform == here else backend.is_preferred(rule, q, v))
    ]


def run(
    implementation: str | None,
    rule: Any,  # of any family; a `Backend`, which is for a MemoryRule, gets it only if it has kernels
    params: PyTree,
    state: PyTree | None,
    tokens: Tokens,
    *,
    max_segments: int | None,
) -> tuple[jax.Array, PyTree]:
    """Runs `memory.scan` on the named backend, or with None on the one preferred on the platform that the call is compiled for.

    Raises:
      ValueError: the backend does not support the call. The message says why.
    """
    q, packed = tokens.q, tokens.segment_ids is not None
    if implementation is not None:
        backend = backend_of(implementation)
        if rule.has_kernels or isinstance(backend, _Everywhere):
            reason = backend.unsupported(rule, params, state, q, packed)
        else:
            reason = f"there are no kernels for a {type(rule).__name__}"
        if reason is not None:
            raise ValueError(
                f'memory.scan: implementation="{implementation}" cannot run this call: {reason}. Use "xla".'
            )
        return backend.scan(rule, params, state, *tokens, max_segments)

    alone = jax.device_count() == 1 or bool(jax.sharding.get_abstract_mesh().manual_axes)
    best: dict[str, Backend] = {}
    for backend in _preferred(rule, q, tokens.v) if rule.has_kernels else ():
        if (alone or backend.is_partitioned) and backend.unsupported(rule, params, state, q, packed) is None:
            best.setdefault(str(backend.platform), backend)
    arrays = (params, state, tokens)
    by = lambda backend: lambda params, state, tokens: backend.scan(rule, params, state, *tokens, max_segments)
    default = by(BACKENDS["xla"])
    branches = {platform: by(backend) for platform, backend in best.items()}
    return jax.lax.platform_dependent(*arrays, default=default, **branches) if branches else default(*arrays)

"""PyTorch libraries timed by `kernels_measured.py` with a case's sizes: flash-linear-attention and titans-pytorch."""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from experiments.benchmarks.measured_cases import CHUNK, Case, inputs

_PACKAGES = {
    "fla": (("torch", "fla"), "pip install flash-linear-attention==0.6.0"),
    "titans_pytorch": (("torch", "titans_pytorch"), "pip install titans-pytorch==0.5.5"),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """One case with one library.

    Attributes:
      run: computes it a number of times and waits for the result.
      result: y and the gradients of q, k, v and gates as NumPy arrays, for libraries that compute our function.
      temporary_bytes: computes it once and returns the peak of additional allocated bytes, or None if PyTorch does not know.
    """

    run: Callable[[int], None]
    result: Callable[[], Any]
    temporary_bytes: Callable[[], int | None]


def missing(engine: str) -> str | None:
    """The reason why a library is not available, or None."""
    packages, command = _PACKAGES[engine]
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed ({command})" if absent else None


def program(case: Case, engine: str, cuda: bool) -> Program:
    """The program of a case. Raises the library's own error for a case that it does not support."""
    # Threads waiting for work would take cores from whatever is timed next.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    if cuda and not torch.cuda.is_available():
        raise ValueError("this torch has no CUDA, or sees no GPU.")
    device = torch.device("cuda" if cuda else "cpu")
    forward, leaves, dy = (_fla if engine == "fla" else _titans)(case, device)
    backward = case.direction == "both"

    def once() -> Any:
        with torch.set_grad_enabled(backward):
            y = forward()
        return y, torch.autograd.grad(y, leaves, dy) if backward else ()

    def run(calls: int) -> None:
        for _ in range(calls):
            once()
        if cuda:
            torch.cuda.synchronize()

    def result() -> Any:
        return _numpy(once())

    def temporary_bytes() -> int | None:
        if not cuda:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(1)
        return torch.cuda.max_memory_allocated() - before

    return Program(run, result, temporary_bytes)


def _numpy(tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple(_numpy(x) for x in tree)
    return tree.detach().float().cpu().numpy()


def _tensors(case: Case, device: Any) -> tuple[Any, ...]:
    """q, k, v, the gates as a dictionary in their order, and the cotangent. All leaves except tokens are float32."""
    import numpy as np
    import torch

    _, q, k, v, gates, dy = inputs(case)
    tokens = lambda x: torch.tensor(x.astype(np.float32), device=device).to(getattr(torch, case.dtype))
    leaf = lambda x: x.requires_grad_(case.direction == "both")
    given = {name: leaf(torch.tensor(x, device=device)) for name, x in gates._asdict().items() if x is not None}
    return leaf(tokens(q)), leaf(tokens(k)), leaf(tokens(v)), given, tokens(dy)


def _fla(case: Case, device: Any) -> tuple[Any, ...]:
    q, k, v, gates, dy = _tensors(case, device)
    leaves = [q, k, v, *gates.values()]
    call = _CALLS[case.operation]
    return lambda: call(q, k, v, **gates)[0], leaves, dy


def _delta_rule(q: Any, k: Any, v: Any, step_size: Any) -> Any:
    from fla.ops.delta_rule import chunk_delta_rule

    return chunk_delta_rule(q, k, v, step_size.to(q.dtype), scale=1.0)


def _gated_delta_rule(q: Any, k: Any, v: Any, retention: Any, step_size: Any) -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, retention.log(), step_size, scale=1.0)


def _kda(q: Any, k: Any, v: Any, retention: Any, step_size: Any) -> Any:
    """With tensor cores for all products, which it may use where logarithms of decays are in [−5, 0)."""
    from fla.ops.kda import chunk_kda

    return chunk_kda(q, k, v, retention.log(), step_size, scale=1.0, safe_gate=True)


def _gla(q: Any, k: Any, v: Any, retention: Any, step_size: Any) -> Any:
    """Its own rule has no step size, which is a factor of the values."""
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v * step_size[..., None].to(v.dtype), retention.log(), scale=1.0)


def _rwkv7(q: Any, k: Any, v: Any, retention: Any, removal_key: Any, removal: Any) -> Any:
    """As its layer calls it, with that layer's bound on decays. `interop.fla_functions` has its a and b in our terms."""
    from fla.ops.rwkv7 import chunk_rwkv7

    first, second = -removal_key, removal_key * removal
    bound = {"safe_gate": True, "lower_bound": -0.6065306597126334, "chunk_size": 64}
    return chunk_rwkv7(q, retention.log(), k, v, first.to(q.dtype), second.to(q.dtype), scale=1.0, **bound)


def _ttt_linear(q: Any, k: Any, v: Any, step_size: Any) -> Any:
    import torch
    from fla.ops.ttt import chunk_ttt_linear

    scale, bias = torch.ones(q.shape[2:], device=q.device), torch.zeros(q.shape[2:], device=q.device)
    return chunk_ttt_linear(q, k, v, scale, bias, step_size[..., None].to(q.dtype), scale=1.0, chunk_size=16)


_CALLS: dict[str, Callable[..., Any]] = {
    "delta_rule": _delta_rule, "gated_delta_rule": _gated_delta_rule, "kda": _kda, "gla": _gla, "rwkv7": _rwkv7,
    "ttt_linear": _ttt_linear,
}  # fmt: skip


def _titans(case: Case, device: Any) -> tuple[Any, ...]:
    """titans-pytorch's memory with chunks of our length, in its fastest mode, with gradients of its input and its parameters."""
    import torch
    from titans_pytorch import MemoryMLP, NeuralMemory

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    model = NeuralMemory(
        dim=case.heads * case.dim, dim_head=case.dim, heads=case.heads, chunk_size=CHUNK,
        model=MemoryMLP(case.dim, depth=2, expansion_factor=4.0), momentum=True,
        mem_model_norm_add_residual=False, qkv_receives_diff_views=False,
    ).to(device, dtype)  # fmt: skip
    x = torch.randn(case.batch, case.tokens, case.heads * case.dim, device=device, dtype=dtype, requires_grad=True)
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    forward = lambda: model(x)[0]
    y = forward()
    # Some parameters do not affect the output.
    gradients = torch.autograd.grad(y.sum(), used, allow_unused=True)
    leaves = [x, *(p for p, g in zip(used, gradients, strict=True) if g is not None)]
    return forward, leaves, torch.ones_like(y)

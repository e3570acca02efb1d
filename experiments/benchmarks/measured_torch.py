"""PyTorch libraries timed by `kernels_measured.py` with a case's sizes: flash-linear-attention and titans-pytorch."""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from experiments.benchmarks.measured_cases import CHUNK, Case, inputs

_PACKAGES = {
    "fla": (("torch", "fla"), "pip install flash-linear-attention"),
    "titans_pytorch": (("torch", "titans_pytorch"), "pip install titans-pytorch"),
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
    import torch

    q, k, v, gates, dy = _tensors(case, device)
    leaves = [q, k, v, *gates.values()]
    step = gates["step_size"]
    if case.operation == "ttt_linear":
        from fla.ops.ttt import chunk_ttt_linear

        scale, bias = torch.ones(case.heads, case.dim, device=device), torch.zeros(case.heads, case.dim, device=device)
        call = lambda: chunk_ttt_linear(
            q, k, v, scale, bias, step[..., None].to(q.dtype), scale=1.0, chunk_size=16
        )  # fmt: skip
    elif case.operation == "gated_delta_rule":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        call = lambda: chunk_gated_delta_rule(q, k, v, gates["retention"].log(), step, scale=1.0)
    else:
        from fla.ops.delta_rule import chunk_delta_rule

        call = lambda: chunk_delta_rule(q, k, v, step.to(q.dtype), scale=1.0)
    return lambda: call()[0], leaves, dy


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

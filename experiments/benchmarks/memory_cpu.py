"""Speed and memory of the memory core on this machine, compared with titans-pytorch.

    python experiments/benchmarks/memory_cpu.py speed      # forward + backward; titans-pytorch if it is installed
    python experiments/benchmarks/memory_cpu.py speed --devices 1   # one CPU device for all cores, JAX's default
    python experiments/benchmarks/memory_cpu.py bytes      # temporary bytes against length, and against per-token weights
    python experiments/benchmarks/memory_cpu.py stream     # a million tokens in pieces: time per piece, resident memory
    python experiments/benchmarks/memory_cpu.py forms      # the engine against the kernels' chunk functions compiled by XLA
    python experiments/benchmarks/memory_cpu.py import     # what `import atlasjax` costs over `import jax`

float32, 4 heads of 64, a two-layer memory of expansion 4, with momentum, chunk 64, batch 1. Only ratios within one run are
meaningful; times depend on the machine. Each command prints a table and appends one JSON line to `--out`.
"""

import argparse
import math
import os
import pathlib
import subprocess
import sys
import time

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments import timing

HEADS, DIM, CHUNK = 4, 64, 64
REST_SECONDS = 0.3  # between two runs: idle threads of PyTorch keep spinning for a while


def inputs(rule, length):
    """The arguments of a rule."""
    return timing.inputs(rule, length, HEADS, DIM, {"step_size": (0.0, 0.01), "momentum_decay": (0.5, 0.95)})


def ours(length):
    """(jitted forward and backward with gradients of every input and parameter, its arguments)."""
    import jax

    from atlasjax import rules

    rule = rules.titans(CHUNK).unbounded()  # like titans-pytorch
    return jax.jit(jax.grad(timing.squares(rule), argnums=(0, 1, 2, 3, 4))), inputs(rule, length)


def over_heads(args):
    """The arguments of `ours` with the heads divided between the devices of this process."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    params, *tokens = args
    mesh = jax.make_mesh((jax.local_device_count(),), ("heads",))
    put = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
    return put(params, "heads"), *(put(x, None, None, "heads") for x in tokens)


def theirs(length, chunk_size, batch_size):
    """Forward and backward of titans-pytorch's NeuralMemory with the same sizes, a function without arguments."""
    import torch
    from titans_pytorch import MemoryMLP, NeuralMemory

    torch.manual_seed(0)
    model = NeuralMemory(
        dim=HEADS * DIM, dim_head=DIM, heads=HEADS, chunk_size=chunk_size, batch_size=batch_size, momentum=True,
        model=MemoryMLP(DIM, depth=2, expansion_factor=4.0), mem_model_norm_add_residual=False, qkv_receives_diff_views=False,
    )  # fmt: skip
    x = torch.randn(1, length, HEADS * DIM)

    def run():
        model.zero_grad()
        y, _ = model(x)
        (y**2).sum().backward()

    return run


def product():
    """(a large float32 product, its FLOP): its rate is the machine's."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((2048, 2048))
    f = jax.jit(lambda x: x @ x)
    return lambda: f(x).block_until_ready(), 2 * 2048**3


def speed(args):
    import jax

    jax.config.update("jax_num_cpu_devices", args.devices)

    def program(length):
        run, values = ours(length)
        values = over_heads(values)
        compiled = run.lower(*values).compile()
        return lambda: jax.block_until_ready(compiled(*values))

    length, small = args.length, 512
    matmul, matmul_flops = product()
    runs = {"ours_s": program(length), "ours_512_s": program(small), "matmul": matmul}
    try:
        import titans_pytorch  # noqa: F401
        import torch
    except ImportError:
        print("titans-pytorch is not installed (pip install -e '.[oracle]'): only our own times.")
    else:
        torch.set_num_threads(os.cpu_count() or 1)
        runs |= {"titans_chunk64_s": theirs(length, 64, None), "titans_per_token_512_s": theirs(small, 1, 64)}
    seconds = timing.in_turn(runs, args.repeats, rest=REST_SECONDS)
    rate = matmul_flops / seconds.pop("matmul") / 1e9
    # Two-layer memory of expansion 4: a product with one weight is 8 d² FLOP. Forward: 3 products for the gradients, 6 for
    # reads (M, S and the scores), 4 for the new M and S, and 4 of width `chunk`; twice as many backward; recomputation once.
    forward = 2 * HEADS * (4 * DIM * DIM * (3 + 4 + 4) + CHUNK * (2 * DIM + 2 * 4 * DIM))
    flops = 4 * forward * length
    result = {
        "length": length,
        "threads": os.cpu_count(),
        "devices": args.devices,
        **seconds,
        "ours_tokens_per_s": length / seconds["ours_s"],
        "matmul_gflops": rate,
        "mflop_per_token": flops / length / 1e6,
        "share_of_matmul_rate": flops / seconds["ours_s"] / 1e9 / rate,
    }
    if "titans_chunk64_s" in seconds:
        result["ratio_to_fastest_mode"] = seconds["titans_chunk64_s"] / seconds["ours_s"]
        result["ratio_to_same_function"] = seconds["titans_per_token_512_s"] / seconds["ours_512_s"]
    return result


def bytes_(args):
    import jax

    result = {}
    for length in (8192, 32768):
        run, values = ours(length)
        analysis = run.lower(*jax.eval_shape(lambda v=values: v)).compile().memory_analysis()
        result[f"temporary_bytes_{length}"] = analysis.temp_size_in_bytes
        # Minimum for a version with per-token weights: M_t of every token for the reads, and their cotangents.
        per_token = 2 * length * HEADS * 2 * 4 * DIM * DIM * 4
        result[f"per_token_weights_bytes_{length}"] = per_token
        result[f"per_token_over_ours_{length}"] = per_token / analysis.temp_size_in_bytes
    result["growth_8192_to_32768"] = result["temporary_bytes_32768"] / result["temporary_bytes_8192"]
    return result


def stream(args):
    import jax

    from atlasjax import memory, rules
    from atlasjax.memory import features

    piece, total = 8192, args.tokens
    rule = rules.omeganet(CHUNK, 4, features=features.Identity())
    params, *arrays = inputs(rule, piece)
    run = jax.jit(lambda state, *arrays: memory.scan(rule, params, state, *arrays), donate_argnums=0)
    state = memory.init_state(rule, params, batch_size=1)
    rows = []
    for i in range(-(-total // piece)):
        start = time.perf_counter()
        y, state = run(state, *arrays)
        jax.block_until_ready((y, state))
        rows.append((time.perf_counter() - start, resident_bytes()))
        if i % 16 == 0:
            ms, mib = rows[-1][0] * 1e3, rows[-1][1] / 2**20
            print(f"  {(i + 1) * piece:>9,} tokens: {ms:7.1f} ms a piece, {mib:7.1f} MiB")
    tenth = max(1, len(rows) // 10)
    median = lambda xs: sorted(xs)[len(xs) // 2]
    return {
        "tokens": len(rows) * piece,
        "piece": piece,
        "first_tenth_s": median([r[0] for r in rows[1 : tenth + 1]]),
        "last_tenth_s": median([r[0] for r in rows[-tenth:]]),
        "resident_after_first_tenth": rows[tenth][1],
        "resident_at_end": rows[-1][1],
        "finite": bool(jax.numpy.isfinite(y).all()),
    }


def by_xla(chunk, carry, tokens, gates, *, dtype, together=1, unroll=None, interpret=False, restarts=None):
    """`pallas_kernels.chunk_scan` with the chunk function of the TPU kernel compiled by XLA for all heads at once."""
    import jax
    import jax.numpy as jnp

    assert restarts is None
    count, size = gates.shape[2], gates.shape[-1]
    time = tokens[0].shape[1]

    def chunks(x):  # [batch, time, heads, dim] → [chunks, batch, heads, size, dim]
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, count * size - time), (0, 0), (0, 0)))
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), (1, 2), (0, 3))

    @jax.checkpoint
    def step(carry, xs):
        return jax.vmap(jax.vmap(chunk))(carry, xs)

    carry, ys = jax.lax.scan(step, carry, (*map(chunks, tokens), jnp.moveaxis(gates, 2, 0)))
    back = lambda y: jnp.moveaxis(y, (0, 3), (1, 2)).reshape(y.shape[1], count * size, *y.shape[2::2])[:, :time]
    return carry, tuple(back(y).astype(dtype) for y in ys)


def forms(args):
    """Time of a chunk's arithmetic in the two forms that the library has, forward and backward, compiled by XLA for this CPU."""
    from unittest import mock

    import jax
    import jax.numpy as jnp

    from atlasjax import memory, rules
    from atlasjax.memory.fast_weights.kernels import pallas_scan
    from atlasjax.memory.tokens import Tokens

    cases = {
        "titans_unbounded": rules.titans(CHUNK).unbounded(),
        "titans": rules.titans(CHUNK),
        "titans_no_momentum": rules.titans_no_momentum(CHUNK),
        "gated_delta_rule": rules.gated_delta_rule(),
    }
    result = {"length": args.length}
    for name, rule in cases.items():
        arguments = inputs(rule, args.length)
        scans = {
            "engine": lambda *a, rule=rule: memory.scan(rule, a[0], None, *a[1:], implementation="xla"),
            "kernels_form": lambda *a, rule=rule: pallas_scan("pallas_tpu", rule, a[0], None, Tokens(*a[1:])),
        }
        compiled = {}
        for form, scan in scans.items():
            run = jax.jit(jax.value_and_grad(lambda *a, scan=scan: (scan(*a)[0] ** 2).sum(), argnums=(0, 1, 2, 3, 4)))
            with (
                mock.patch("pallas_kernels.chunk_memory.api.chunk_scan", by_xla),
                mock.patch("pallas_kernels.delta_rule.api.chunk_scan", by_xla),
            ):
                compiled[form] = run.lower(*arguments).compile()
        first, second = (jax.tree.leaves(f(*arguments)) for f in compiled.values())
        for x, y in zip(first, second):
            assert jnp.abs(x - y).max() <= 1e-3 * jnp.abs(x).max()
        wait = lambda run, arguments=arguments: lambda: jax.block_until_ready(run(*arguments))
        times = timing.in_turn({form: wait(run) for form, run in compiled.items()}, args.repeats, rest=REST_SECONDS)
        result |= {f"{name}_{form}_s": seconds for form, seconds in times.items()}
        result[f"{name}_ratio"] = times["kernels_form"] / times["engine"]
    return result


def resident_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def import_(args):
    def seconds(statement):
        code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
        return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))

    jax_s, ours_s = seconds("import jax"), seconds("import atlasjax")
    memory_s = seconds("import atlasjax.memory, atlasjax.rules")
    return {"import_jax_s": jax_s, "import_atlasjax_s": ours_s, "import_atlasjax_memory_s": memory_s}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"speed": speed, "bytes": bytes_, "stream": stream, "forms": forms, "import": import_}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--devices",
        type=int,
        default=math.gcd(HEADS, os.cpu_count() or 1),
        help="speed: CPU devices, among which the heads are divided; default: one for each core",
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--out", type=pathlib.Path, help="append the result to this JSONL file")
    args = parser.parse_args()
    result = {"benchmark": args.what, **commands[args.what](args)}
    for name, value in result.items():
        print(f"{name:36s} {value:,.4g}" if isinstance(value, float) else f"{name:36s} {value}")
    timing.keep(args.out, result)


if __name__ == "__main__":
    main()

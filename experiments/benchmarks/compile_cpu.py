"""The time to the first result on this machine: tracing, compiling, and whole commands. Each measurement has a process of its own.

    python experiments/benchmarks/compile_cpu.py rules                          # `jax.jit(value_and_grad(memory.scan))`
    python experiments/benchmarks/compile_cpu.py models                         # the training step of tiny models
    python experiments/benchmarks/compile_cpu.py commands                       # `atlasjax train --steps 2`, errors, imports
    python experiments/benchmarks/compile_cpu.py rules --other ../before --only titans atlas    # beside another checkout

Nothing that was compiled before is used. Processor seconds of tracing (to a jaxpr), lowering and compiling; the lines of HLO that
the compiler is given; temporary bytes; wall seconds from the start of the process to the first result; processor seconds of one
run. With `--other`, both checkouts are measured in turn, `--repeats` times, and the least of each number counts; their runs take
turns too. A ratio is this checkout's number divided by the other's. One line of JSON for each row is appended to `--out`.
"""

import argparse
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = ("titans", "omeganet", "atlas", "dot", "gated_delta_rule", "linear_attention")
MODELS = ("titans-tiny", "atlas-tiny", "gated-deltanet-tiny", "transformer++-tiny")
# name → what Python runs. {} is an empty folder.
_ATLASJAX = ("-c", "import sys; from atlasjax.cli import main; sys.exit(main())")
COMMANDS = {
    "import jax": ("-c", "import jax"),
    "import atlasjax": ("-c", "import atlasjax"),
    "atlasjax --help": (*_ATLASJAX, "--help"),
    "a preset that is unknown": (*_ATLASJAX, "train", "--preset", "titan-tiny"),
    "an option that is unknown": (*_ATLASJAX, "train", "--stepz", "2"),
    "a run that is missing": (*_ATLASJAX, "generate", "{}/none"),
    **{
        f"train {model}, 2 steps": (*_ATLASJAX, "train", "--preset", model, "--steps", "2", "--run-dir", "{}/run")
        for model in MODELS
    },
}
SHORTEST = 0.2  # processor seconds of runs that are measured together
Row = dict[str, object]


def program(kind, name, options):
    """(jitted function, its arguments) of a rule or a preset."""
    return _of_rule(name, options) if kind == "rules" else _of_model(name)


def _of_rule(name, options):
    """Value and gradients with respect to every parameter and input."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from atlasjax import memory, rules

    rule, heads, dim = rules.REGISTRY[name](), options.heads, options.dim
    rng = np.random.default_rng(0)
    normal = lambda: rng.standard_normal((1, options.length, heads, dim)).astype("float32")
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    sizes = {"batch_size": 1, "time": options.length, "num_heads": heads, "key_dim": dim, "value_dim": dim}
    gates = memory.suggested_gates(rule, **sizes)
    params = memory.init_params(rule, jax.random.key(0), num_heads=heads, key_dim=dim, value_dim=dim)
    args = jax.tree.map(jnp.asarray, (params, unit(normal()), unit(normal()), normal(), gates))
    loss = lambda params, *args: jnp.sum(memory.scan(rule, params, None, *args)[0] ** 2)
    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args))))), args


def _of_model(name):
    """The training step of a preset on one device."""
    import dataclasses

    from atlasjax.distributed.mesh import MeshConfig
    from atlasjax.distributed.sharding import global_batch
    from atlasjax.train.defaults import default_config
    from atlasjax.train.setup import prepare
    from atlasjax.train.step import jit_train_step

    config = default_config(name)
    data = dataclasses.replace(config.data, validation_fraction=0.0)
    config = dataclasses.replace(config, data=data, mesh=MeshConfig(data=1), accumulation=1)
    setup = prepare(config)
    batch = global_batch(next(iter(setup.train_data)), setup.mesh)
    step = jit_train_step(
        setup.graphdef, setup.optimizer, setup.schedule, setup.shardings, setup.mesh, loss=config.loss
    )
    return step, (setup.init_state(), batch)


def work(kind, name, options):
    """A child process: prints what the first result took, then the processor seconds of one run for each line of its input."""
    import jax

    function, args = program(kind, name, options)
    clock = [time.process_time()]
    traced = function.trace(*args)
    clock.append(time.process_time())
    lowered = traced.lower()
    clock.append(time.process_time())
    compiled = lowered.compile()
    clock.append(time.process_time())
    copy = lambda: jax.tree.map(lambda x: x.copy(), args[:1]) + args[1:]  # a training step takes its state's memory
    jax.block_until_ready(compiled(*copy()))
    row = dict(zip(("trace_s", "lower_s", "compile_s"), (b - a for a, b in itertools.pairwise(clock))))
    row |= {
        "hlo_lines": lowered.as_text("hlo").count("\n"),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "first_result_s": time.time() - options.started,
    }
    print(json.dumps(row), flush=True)
    for _ in sys.stdin:
        runs, total = 0, 0.0
        while total < SHORTEST:
            values = jax.block_until_ready(copy())
            start = time.process_time()
            jax.block_until_ready(compiled(*values))
            total, runs = total + time.process_time() - start, runs + 1
        print(json.dumps(total / runs), flush=True)


def _environment(tree):
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return kept | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}


def _child(tree, kind, name, options):
    command = [sys.executable, __file__, kind, "--work", name, "--started", repr(time.time())]
    for size in ("length", "heads", "dim"):
        command += [f"--{size}", str(getattr(options, size))]
    return subprocess.Popen(
        command, env=_environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree
    )


def _answer(process):
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{' '.join(process.args)} ended with code {process.wait()}.")
    return json.loads(line)


def least(rows):
    """The least of each number."""
    return {name: min(row[name] for row in rows) for name in rows[0]}


def first_results(trees, kind, name, options):
    """tree → its numbers. The children of all trees start one after the other; then their runs take turns."""
    found = {tree: [] for tree in trees}
    for repeat in range(options.repeats):
        children = {}
        for tree, path in trees.items():
            children[tree] = _child(path, kind, name, options)
            found[tree].append(_answer(children[tree]))
        seconds = {tree: [] for tree in trees}
        for _ in range(options.rounds):
            for tree, process in children.items():
                process.stdin.write("\n")
                process.stdin.flush()
                seconds[tree].append(_answer(process))
        for tree, process in children.items():
            found[tree][repeat]["run_s"] = min(seconds[tree])
            process.stdin.close()
            process.wait()
    return {tree: least(rows) for tree, rows in found.items()}


def _ran(tree, arguments):
    """What one process took. Some of these commands are to fail."""
    folder = tempfile.mkdtemp()
    command = [sys.executable, *(argument.replace("{}", folder) for argument in arguments)]
    start = time.perf_counter()
    with open(pathlib.Path(folder, "log"), "w+") as log:
        environment = _environment(tree) | {"JAX_LOG_COMPILES": "1"}
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
        row = {}
        for line in process.stdout:
            if line.startswith("step "):
                row.setdefault("first_line_s", time.perf_counter() - start)
        _, status, used = os.wait4(process.pid, 0)
        row |= {"wall_s": time.perf_counter() - start, "processor_s": used.ru_utime + used.ru_stime}
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        row["programs"] = sum("Compiling " in line for line in log)
    shutil.rmtree(folder, ignore_errors=True)
    return row | {"code": process.returncode}


def whole_commands(trees, name, options):
    """tree → its numbers."""
    found = {tree: [] for tree in trees}
    for _ in range(options.repeats):
        for tree, path in trees.items():
            found[tree].append(_ran(path, COMMANDS[name]))
    return {tree: least(rows) for tree, rows in found.items()}


def ratios(result):
    """Number → this checkout's divided by the other's."""
    now, other = result["now"], result["other"]
    return {
        name: value / other[name] for name, value in now.items() if name in other and other[name] and name != "code"
    }


def shown(numbers):
    return "  ".join(
        f"{name} {value:,.3g}" if isinstance(value, float) else f"{name} {value:,}" for name, value in numbers.items()
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"rules": RULES, "models": MODELS, "commands": tuple(COMMANDS)}
    parser.add_argument("kind", choices=names)
    parser.add_argument("--only", nargs="+", help="some rules, presets or commands, by name")
    parser.add_argument("--other", type=pathlib.Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--length", type=int, default=512, help="rules: tokens")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="processes of each checkout and row")
    parser.add_argument("--rounds", type=int, default=5, help="rules and models: runs in turn")
    parser.add_argument("--out", type=pathlib.Path, help="append the rows to this JSONL file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.kind, options.work, options)
        return
    trees = {"now": ROOT} | ({"other": options.other.resolve()} if options.other else {})
    for name in options.only or names[options.kind]:
        if options.kind == "commands":
            result = whole_commands(trees, name, options)
        else:
            result = first_results(trees, options.kind, name, options)
        if options.other:
            result["ratio"] = ratios(result)
        for tree, numbers in result.items():
            print(f"{name:26s} {tree:6s} {shown(numbers)}", flush=True)
        if options.out:
            row = {"kind": options.kind, "name": name, "repeats": options.repeats, **result}
            if options.kind == "rules":
                row |= {"length": options.length, "heads": options.heads, "dim": options.dim}
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

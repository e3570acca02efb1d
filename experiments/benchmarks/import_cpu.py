"""Memory and time of importing public weights, beside transformers' `from_pretrained`, on this machine.

    python -m experiments.benchmarks.import_cpu                     # a Granite-4.0-H of 890 MB in float32, random weights
    python -m experiments.benchmarks.import_cpu --layers 8          # of 510 MB
    python -m experiments.benchmarks.import_cpu --keep weights      # the files stay in this folder, and are used again

The extra `oracle` has transformers, which makes the weights. Each loader runs in a process of its own, in turn, so that memory of
one is not that of another. Its numbers are above those of the process before it loads, with the libraries imported: of resident
memory the peak that the kernel counted (`VmHWM`, with mapped pages of the files), and the peak of memory that no file backs
(`RssAnon`, sampled each 2 ms). The files are read once before, so that all read from the page cache. Prints a table and appends
a row for each to `--out`; only ratios within one run are meaningful.
"""

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from experiments.rows import append_row

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROWS = pathlib.Path(__file__).with_suffix(".jsonl")
DIM, VOCAB, ATTENTION_EVERY = 1024, 32_000, 4
LOADERS = ("transformers", "import", "load")
TOLD = {
    "transformers": "`from_pretrained` of transformers, and every parameter read once",
    "import": "`import_weights`, until the run is complete on the disk",
    "load": "`load_run` of the imported run",
}


def make(folder: pathlib.Path, layers: int) -> None:
    """Writes a Granite-4.0-H with random weights as transformers saves it."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    kinds = ["attention" if n % ATTENTION_EVERY == ATTENTION_EVERY - 1 else "mamba" for n in range(layers)]
    config = GraniteMoeHybridConfig(
        vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=layers, layer_types=kinds, num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=2 * DIM, num_attention_heads=16, num_key_value_heads=4, mamba_n_heads=32, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_expand=2, position_embedding_type="nope", tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    GraniteMoeHybridForCausalLM(config).save_pretrained(folder, max_shard_size="100GB")


def status(name: str) -> int:
    """A number of bytes of this process, as Linux counts it."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"import_cpu: this system does not count {name}.")


@contextlib.contextmanager
def sampled(found: dict[str, float]) -> Iterator[None]:
    """Puts peaks of memory above the present, and times, into `found`."""
    anonymous, resident, stop = [status("RssAnon")], status("VmRSS"), threading.Event()

    def sample() -> None:
        while not stop.wait(0.002):
            anonymous.append(status("RssAnon"))

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    thread = threading.Thread(target=sample)
    thread.start()
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    found |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    stop.set()
    thread.join()
    found |= {"anonymous": max(anonymous) - anonymous[0], "resident": status("VmHWM") - resident}


def load(loader: str, weights: pathlib.Path, run: pathlib.Path, pipe) -> None:
    """One loader, in a process of its own. Sends what it took."""
    found: dict[str, float] = {}
    action: Callable[[], object]
    if loader == "transformers":
        import torch
        from transformers import GraniteMoeHybridForCausalLM

        def action() -> object:
            model = GraniteMoeHybridForCausalLM.from_pretrained(weights, dtype=torch.float32)
            return model, [parameter.sum() for parameter in model.parameters()]  # it has only mapped the file
    else:
        import jax

        from atlasjax.interop import import_weights
        from atlasjax.train.load import load_run

        jax.devices()
        action = (
            (lambda: import_weights(weights, run, tokenizer="byte"))
            if loader == "import"
            else lambda: jax.block_until_ready(load_run(run).model)
        )
    with sampled(found):
        kept = action()
    del kept
    pipe.send(found)


def measured(weights: pathlib.Path, repeats: int) -> dict[str, dict[str, float]]:
    """Loader → the medians of its numbers over the rounds. In a round all take turns."""
    context = multiprocessing.get_context("spawn")
    each: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
    for file in weights.iterdir():  # into the page cache
        with file.open("rb") as opened:
            while opened.read(2**24):
                pass
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=weights.parent) as folder:
            for loader in LOADERS:
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=load, args=(loader, weights, pathlib.Path(folder) / "run", there))
                process.start()
                there.close()
                each[loader].append(here.recv())
                process.join()
    return {
        loader: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for loader, found in each.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=pathlib.Path, help="folder of the weights; without it they are deleted")
    parser.add_argument("--out", type=pathlib.Path, default=ROWS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        weights = (args.keep or pathlib.Path(temporary)) / f"granite-{args.layers}"
        if not weights.exists():
            make(weights, args.layers)
        size = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
        found = measured(weights, args.repeats)
    print(f"{size / 1e6:.0f} MB of float32, {args.layers} layers, medians of {args.repeats}\n")
    print(
        "| loader | peak resident / size | peak without files / size | seconds | of a core |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for loader, numbers in found.items():
        row = {"loader": loader, "layers": args.layers, "bytes": size, "repeats": args.repeats}
        append_row(args.out, row | {name: round(value, 2) for name, value in numbers.items()})
        print(
            f"| {TOLD[loader]} | {numbers['resident'] / size:.2f} | {numbers['anonymous'] / size:.2f} | "
            f"{numbers['seconds']:.1f} | {numbers['cpu_seconds']:.1f} |"
        )


if __name__ == "__main__":
    main()

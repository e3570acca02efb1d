"""Time, memory and accuracy of building banks.

    python -m experiments.elastic.build                               # N = 540, blocks of 1,024 tokens: seconds
    python -m experiments.elastic.build --order 8640 --blocks 2       # half a minute per block, 2.0 GB

Builds into a temporary folder, or into --cache-dir. Two checks: the first column of P_m = r^A is r ∫_0^1 g_n(ru) du, which has a
closed form, and a constant signal must stay constant, c = (1, 0, 0, …).
"""

import argparse
import resource
import tempfile
import time

import numpy as np

from atlasjax.mixers.elastic import banks, hippo


def check(bank: banks.Bank, block: int) -> tuple[float, float]:
    """Largest errors of the first column of the block's P, and of the coefficients of a constant signal after the block."""
    order = bank.transitions.shape[1]
    antiderivatives = hippo._antiderivatives(order, np.array([0.0, block / (block + 1)]))
    column = float(np.abs(bank.transitions[block][:, 0] - np.diff(antiderivatives)[:, 0]).max())
    constant = bank.transitions[block][:, 0] * (block > 0) + bank.kernels[block].sum(1, dtype=np.float64)
    return column, float(np.abs(constant - np.eye(1, order)[0]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", type=int, default=540)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--cache-dir")
    options = parser.parse_args()
    size = banks.bank_bytes(options.order, options.block_size, options.blocks)
    print(
        f"a bank of {size / 1e6:.1f} MB; {hippo.build_bytes(options.order, options.block_size) / 1e9:.2f} GB to build a block"
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for name in ("built", "read"):
            start = time.perf_counter()
            banks._load.cache_clear()
            bank = banks.load(
                options.order, options.block_size, options.blocks, cache_dir=options.cache_dir or folder, progress=print
            )
            seconds.append(time.perf_counter() - start)
            print(f"{name}: {seconds[-1]:.2f} s")
    column, constant = check(bank, options.blocks - 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"errors, float32: first column of P {column:.1e}, a constant signal {constant:.1e}; peak memory {peak:.2f} GB"
    )


if __name__ == "__main__":
    main()

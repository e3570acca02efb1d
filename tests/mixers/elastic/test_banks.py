"""The cache of banks: what it holds, how it grows, and what happens to broken files."""

import warnings

import numpy as np
import pytest

from atlasjax import cache
from atlasjax.mixers.elastic import banks, hippo

ORDER, SIZE = 5, 7


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(banks, "_BLOCKS_OF_A_FILE", 2)
    banks._load.cache_clear()
    yield tmp_path
    banks._load.cache_clear()


def load(folder, blocks, **options):
    banks._load.cache_clear()  # as another process
    lines = []
    bank = banks.load(ORDER, SIZE, blocks, cache_dir=folder, progress=lines.append, **options)
    return bank, len(lines)


def files(folder):
    return sorted(folder.rglob("*.npz"))


def test_values_and_extension(folder):
    bank, built = load(folder, 3)
    assert built == 4  # whole files
    assert bank.transitions.shape == (3, ORDER, ORDER)
    assert bank.kernels.shape == (3, ORDER, SIZE)
    for m in range(3):
        p, k = hippo.block(ORDER, m * SIZE, (m + 1) * SIZE)
        np.testing.assert_array_equal(bank.transitions[m], p.astype(np.float32))
        np.testing.assert_array_equal(bank.kernels[m], k.astype(np.float32))
    longer, built = load(folder, 6)
    assert built == 2
    np.testing.assert_array_equal(longer.kernels[:3], bank.kernels)
    assert load(folder, 6)[1] == 0
    assert load(folder, 0)[0].transitions.shape == (0, ORDER, ORDER)
    assert load(folder, 1, discretization="backward")[1] == 2
    assert load(folder, 1, legacy_hippo=True)[1] == 2
    assert len(files(folder)) == 5
    assert not list(folder.rglob("*.partial"))
    with pytest.raises(ValueError, match="read-only"):
        bank.kernels[0] = 0


def test_a_broken_file_is_built_again(folder):
    good, _ = load(folder, 2)
    path = files(folder)[0]
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for broken in (b"", content[:-40], bytes(flipped), b"not a file of arrays"):
        path.write_bytes(broken)
        with pytest.warns(UserWarning, match="cannot be read .*rebuilding it"):
            bank, built = load(folder, 2)
        assert built == 2
        np.testing.assert_array_equal(bank.transitions, good.transitions)
        assert path.read_bytes() != broken
        assert load(folder, 2)[1] == 0
    with path.open("wb") as file:
        np.savez(file, transitions=good.transitions[:1], kernels=good.kernels[:1])
    with pytest.warns(UserWarning, match="do not match its name"):
        load(folder, 2)


def test_a_folder_that_cannot_be_written_costs_a_warning(folder):
    (folder / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written.*ATLASJAX_CACHE"):
        bank, _ = load(folder / "file", 1)
    np.testing.assert_allclose(bank.kernels[0], hippo.kernel(ORDER, 0, SIZE), atol=1e-6)


def test_an_unstable_bank_is_announced_once(folder):
    """Also when it comes from the cache, and only for blocks that were asked for."""
    order, size = 16, 8
    for _ in ("built", "cached"):
        banks._load.cache_clear()
        with pytest.warns(RuntimeWarning) as caught:
            banks.load(order, size, 3, discretization="forward", cache_dir=folder)
        assert [str(w.message).partition(", where")[0] for w in caught] == [
            "elastic bank: discretization='forward' with order=16 is unstable in block 0 of 8 tokens: it amplifies a signal "
            "5.2e+08-fold"
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        banks.load(order, size, 0, discretization="forward", cache_dir=folder)
        banks.load(order, size, 3, discretization="backward", cache_dir=folder)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("ATLASJAX_CACHE", str(tmp_path / "a"))
    assert cache.folder() == tmp_path / "a"
    monkeypatch.delenv("ATLASJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "atlasjax"


def test_sizes_and_bad_input(folder):
    assert banks.bank_bytes(540, 1024, 2) == 2 * 540 * 1564 * 4
    assert banks.blocks_of_a_file(8640, 2048) == 1
    for name, arguments in (("order", (0, 7, 1)), ("block_size", (5, 0, 1)), ("blocks", (5, 7, -1))):
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            banks.load(*arguments)
    with pytest.raises(ValueError, match="legacy_hippo must be True or False, got 'no'"):
        banks.load(5, 7, 1, legacy_hippo="no")
    with pytest.raises(ValueError, match="Unknown discretization 'euler'"):
        banks.load(5, 7, 1, discretization="euler", cache_dir=folder)

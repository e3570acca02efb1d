"""How much memory there is, so that what cannot fit is refused before anything of its size is made."""

import os
import pathlib

from atlasjax.check import shown

GIB = 2**30


def machine_memory() -> int:
    """Memory in bytes of the machine, or of the container that this process runs in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    # The limit of a container, in the second version of cgroups and in the first.
    for path in map(pathlib.Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = path.read_text().strip() if path.exists() else ""
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def available_bytes() -> int | None:
    """Memory in bytes of one of this process's devices. CPU devices share the memory of the machine. None if unknown."""
    import jax

    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    return machine_memory() // len(devices)


def check_fits(name: str, value: int, least: int, each: int, available: int | None, what: str) -> None:
    """Raises ValueError if `least + value · each` bytes are more than are available. The message has the largest value that fits.

    Args:
      name, value: of the argument that decides how much is made.
      least: bytes that are needed in any case.
      each: bytes for each one of `value`.
      available: bytes of memory. None means unknown, and nothing is checked.
      what: what the memory is for, for the message.
    """
    needed = least + value * each
    if available is None or needed <= available:
        return
    most = (available - least) // each if each else 0
    can = f"it must be at most {most:,}" if most >= 1 else "not even 1 fits"
    raise ValueError(
        f"{name} is {shown(value)}, for which {what} would take {shown(needed // GIB)} GiB; {can}, with {available / GIB:,.1f} GiB "
        "of memory."
    )

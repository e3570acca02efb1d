"""Files on a disk or in a store (gs://…), with one way to name, read, write, append and lock them."""

from atlasjax.storage.logs import Log, open_log, read_log
from atlasjax.storage.paths import (
    AccessError,
    AnyPath,
    StoreError,
    StorePath,
    explained,
    explaining,
    is_outage,
    local_path,
    path,
    read_object,
    write_whole,
)

__all__ = [
    "AccessError",
    "AnyPath",
    "Log",
    "StoreError",
    "StorePath",
    "explained",
    "explaining",
    "is_outage",
    "local_path",
    "open_log",
    "path",
    "read_log",
    "read_object",
    "write_whole",
]

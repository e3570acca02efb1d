"""Files on a disk or in a store (gs://…), with one way to name, read, write, append and lock them."""

from atlasjax.storage.hub import fetched
from atlasjax.storage.logs import Log, open_log, read_log
from atlasjax.storage.paths import (
    AccessError,
    AnyPath,
    StoreError,
    StorePath,
    expanded,
    explained,
    explaining,
    is_outage,
    local_path,
    path,
    read_json,
    read_object,
)
from atlasjax.storage.writing import new_folder, replacing, sweep, temporary_folder, write_whole

__all__ = [
    "AccessError",
    "AnyPath",
    "Log",
    "StoreError",
    "StorePath",
    "expanded",
    "explained",
    "explaining",
    "fetched",
    "is_outage",
    "local_path",
    "new_folder",
    "open_log",
    "path",
    "read_json",
    "read_log",
    "read_object",
    "replacing",
    "sweep",
    "temporary_folder",
    "write_whole",
]

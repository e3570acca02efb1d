"""Serving a language model: continuous batching, memories under names, and OpenAI's HTTP interface."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlasjax.serve.batching import Batcher, Ticket, Worker
    from atlasjax.serve.limits import BatchConfig
    from atlasjax.serve.requests import ClosedError, Done, Failed, Piece, QueueFullError, Request

# Loaded on first use: the options of a command need no Flax.
_HOME = {
    "Batcher": "batching",
    "Ticket": "batching",
    "Worker": "batching",
    "BatchConfig": "limits",
    "ClosedError": "requests",
    "Done": "requests",
    "Failed": "requests",
    "Piece": "requests",
    "QueueFullError": "requests",
    "Request": "requests",
}

__all__ = [
    "BatchConfig",
    "Batcher",
    "ClosedError",
    "Done",
    "Failed",
    "Piece",
    "QueueFullError",
    "Request",
    "Ticket",
    "Worker",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

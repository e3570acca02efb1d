"""Serving a language model: continuous batching, memories under names, and OpenAI's HTTP interface."""

from typing import TYPE_CHECKING

from atlasjax.names import lazily

if TYPE_CHECKING:
    from atlasjax.serve.batching import Batcher, Ticket, Worker
    from atlasjax.serve.limits import BatchConfig
    from atlasjax.serve.requests import ClosedError, Done, Failed, Piece, QueueFullError, Request

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

# Loaded on first use: the options of a command need no Flax.
__getattr__ = lazily(
    __name__,
    {
        "batching": "Batcher Ticket Worker",
        "limits": "BatchConfig",
        "requests": "ClosedError Done Failed Piece QueueFullError Request",
    },
)

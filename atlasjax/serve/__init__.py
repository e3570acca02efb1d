"""Serving a language model: continuous batching, memories under names, and OpenAI's HTTP interface."""

from atlasjax.serve.batching import (
    BatchConfig,
    Batcher,
    ClosedError,
    Done,
    Failed,
    Piece,
    QueueFullError,
    Request,
    Ticket,
    Worker,
)

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

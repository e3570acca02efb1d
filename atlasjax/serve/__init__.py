"""Serving a language model: continuous batching, memories under names, and OpenAI's HTTP interface."""

from atlasjax.serve.batching import BatchConfig, Batcher, Ticket, Worker
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

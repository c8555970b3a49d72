"""Brokers and workers for the integration tests."""

from tests.worker_fixtures import (
    backend,
    broker,
    long_model,
    shared_backend,
    shared_broker,
    shared_worker,
    start_worker,
)

__all__ = [
    "backend",
    "broker",
    "long_model",
    "shared_backend",
    "shared_broker",
    "shared_worker",
    "start_worker",
]

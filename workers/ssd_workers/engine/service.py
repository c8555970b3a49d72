"""EngineService: the one thread that owns the models."""

from __future__ import annotations

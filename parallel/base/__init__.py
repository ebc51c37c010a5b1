"""Checks, schemas, lazy exports and files; imports nothing else of ours."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})

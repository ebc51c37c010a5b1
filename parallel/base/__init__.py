"""Checks, schemas, lazy exports and files; imports nothing else of ours."""

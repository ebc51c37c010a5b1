"""Checks, schemas, lazy exports and files; imports no other project package."""

"""Declarations of config keys: one dataclass per section."""

"""Execution of collective schedules by jax programs."""

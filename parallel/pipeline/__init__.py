"""Execution of pipeline schedules by jax programs."""

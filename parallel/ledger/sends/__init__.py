"""Communication of any jax program: its readings, a report, a timeline."""

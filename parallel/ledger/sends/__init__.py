"""Communication of any jax program: analysis, report and timeline."""

"""Plans as data, and their costs: schedules, routes, placements; no jax."""

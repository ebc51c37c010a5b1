"""Pipeline schedules as data: builders, checks, costs and simulated times."""

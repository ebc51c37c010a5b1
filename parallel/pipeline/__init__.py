"""Pipeline schedules as data: builders, checks, cost, simulation, execution."""

"""Bodies of launch.benchmark, by subject, and their common harness."""

"""Training with elastic membership: workers join and leave during the run."""

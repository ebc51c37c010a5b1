"""ZeRO on a mesh: collectives and execution for partitioned training state."""

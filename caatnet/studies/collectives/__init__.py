"""Times of collectives on topologies."""

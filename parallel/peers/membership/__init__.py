"""Coordinator, state machine and journal of a swarm."""

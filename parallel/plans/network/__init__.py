"""Simulators of collective schedules on a topology, and inference bounds."""

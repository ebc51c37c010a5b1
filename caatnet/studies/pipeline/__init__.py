"""Bubble, memory and time of pipeline schedules."""

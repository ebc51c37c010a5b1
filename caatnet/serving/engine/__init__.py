"""Execution of scheduled steps, on a device or in a simulator."""

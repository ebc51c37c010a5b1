"""Memory outside the device, placements, and slots for weights on it."""

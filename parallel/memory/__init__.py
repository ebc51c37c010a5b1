"""Memory outside the device: host arrays, offloaded state, rows of features."""

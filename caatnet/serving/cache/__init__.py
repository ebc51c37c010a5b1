"""Page accounting of the key-value cache, on the device and on the host."""

"""Whether a sharded JAX program computes what it computes on one device."""

"""Search for a 3D configuration on a cluster."""

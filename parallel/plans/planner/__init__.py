"""Search for 3D-parallel configurations."""

"""How work is split, scheduled, routed and placed, and its cost: no jax."""

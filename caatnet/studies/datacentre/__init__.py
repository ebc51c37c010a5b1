"""Energy, cost and time of training in a datacentre."""

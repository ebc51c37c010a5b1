"""Network topologies: graphs of ranks, switches and directed links."""

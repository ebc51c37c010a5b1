"""Spanning trees of optimal throughput: no link exceeds the cut bound."""

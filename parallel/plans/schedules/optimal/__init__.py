"""Spanning trees whose most loaded link reaches the cut bound."""

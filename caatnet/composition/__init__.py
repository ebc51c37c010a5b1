"""Compositions of experts: training of router and experts, and evaluation."""

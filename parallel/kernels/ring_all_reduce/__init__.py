"""Partial all-reduce over a ring, fused with residual add and RMSNorm."""

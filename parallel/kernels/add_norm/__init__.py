"""Residual add and RMSNorm in one kernel."""

"""Sum over ranks, residual add and RMSNorm in one kernel."""

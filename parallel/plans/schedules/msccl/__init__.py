"""Import and export of schedules as MSCCL's XML."""

"""Configs of studies: one section per study."""

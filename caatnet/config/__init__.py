"""Builders of experiments and their parts from configs."""

"""Configurations chosen by published configurators such as AMP and Pipette."""

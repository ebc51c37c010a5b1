"""ZeRO partitions of the training state: sharding, collectives and their cost.
"""

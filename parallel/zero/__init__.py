"""ZeRO partitions of the training state: sharding, collectives and their cost.
"""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "cost": ["Memory", "Parameter", "level_collectives", "memory"],
  "gathered": ["Gathered", "Shard"],
  "partition": ["Level", "Partition", "named", "parse_levels"],
  "shards": ["Shards"],
})

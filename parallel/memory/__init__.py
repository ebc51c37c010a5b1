"""Memory outside the device, placements, and slots for weights on it."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "caches": ["belady", "lru", "most_frequent"],
  "features": ["Lookup", "Table"],
  "offload": ["offloading"],
  "host_memory": ["allocate", "nodes", "nodes_of"],
  "host_optimizer": ["AdamW", "HostOptimizer"],
  "problem": ["Problem", "training_step"],
  "slots": ["Slots"],
})

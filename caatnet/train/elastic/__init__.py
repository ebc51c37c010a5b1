"""Training with elastic membership: workers join and leave during the run."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "swarm_loop": ["Endpoint"],
})

"""Training of workers that join and leave."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "swarm_loop": ["Place"],
})

"""Elastic training: peers join and leave a swarm during a run."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "timeouts": ["Finished", "Halted"],
  "settings": ["Options", "Settings"],
  "swarm": ["Swarm"],
})

"""Configurations chosen by published configurators such as AMP and Pipette."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["run"],
})

"""Residual stream of tensor ranks and its column- and row-parallel projections.
"""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "partial_sync": ["PartialSync"],
  "projections": ["column_parallel", "row_parallel"],
  "stream": ["Stream", "enter"],
})

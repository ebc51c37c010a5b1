"""Mechanisms of parallel programs: partitioning, communication and timing."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "axes": ["Axis", "make_mesh"],
  "collectives": [
    "all_gather", "all_reduce", "all_to_all", "each_lane", "permute",
    "ranks_here", "reduce_scatter", "varying",
  ],
  "quantize": ["coded_mean"],
  "routes": ["ROUTES"],
  "wire": ["Wire"],
})

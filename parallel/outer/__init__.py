"""Outer loops: synchronisation of training workers, one algorithm per file."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "base": ["OuterLoop", "Plan"],
  "data_parallel": ["DataParallel"],
  "dc_s3gd": ["DCS3GD"],
  "diloco": ["DiLoCo"],
  "eager": ["Eager"],
  "exchange": ["Exchange"],
  "noloco": ["NoLoCo"],
  "optimizers": ["Nesterov", "OuterOptimizer"],
  "sparseloco": ["SparseLoCo"],
  "streaming": ["Streaming"],
})

"""Operations that are known not to communicate between devices.

A ledger understands an instruction if it is a collective in a form that the
ledger reads, or an operation of these tables. Any other instruction may
communicate.

Sources: ``hlo/ir/hlo_opcode.h`` of XLA; the StableHLO specification; targets
that jax 0.10 to 0.12 and its libraries register; targets in programs that
XLA:CPU, XLA:GPU and libtpu 0.0.42 compile.
"""

import re

# HLO opcodes, without those that communicate and the suffixes of asynchronous
# pairs. Computations that an instruction calls are read separately.
_OPCODES = frozenset(re.findall(r"\S+", """
  abs acos acosh add add-dependency after-all and asin asinh async atan2 atanh
  batch-norm-grad batch-norm-inference batch-norm-training bitcast
  bitcast-convert broadcast call cbrt ceil cholesky clamp compare complex
  concatenate conditional constant convert convolution copy cosh cosine
  count-leading-zeros divide domain dot dynamic-reshape dynamic-slice
  dynamic-update-slice erf exponential exponential-minus-one fft floor fusion
  gather get-dimension-size get-tuple-element imag infeed iota is-finite log
  log-plus-one logistic map maximum minimum multiply negate not opt-barrier or
  outfeed pad parameter partition-id popcnt power ragged-dot real reduce
  reduce-precision reduce-window remainder replica-id reshape reverse rng
  rng-bit-generator rng-get-and-update-state round-nearest-afz
  round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter
  set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign
  sine sinh slice sort sqrt stochastic-convert subtract tan tanh topk transpose
  triangular-solve tuple while xor
"""))
# StableHLO operations that HLO does not have or names differently.
_STABLEHLO = frozenset(re.findall(r"\S+", """
  async-done async-start broadcast-in-dim case composite create-token
  custom-call dot-general dynamic-broadcast-in-dim dynamic-conv dynamic-gather
  dynamic-iota dynamic-pad einsum if optimization-barrier real-dynamic-slice
  return torch-index-select trace unary-einsum uniform-dequantize
  uniform-quantize
"""))
# Operations of other dialects; "chlo" has arithmetic only.
_DIALECTS = {
  "func": {"func", "call", "return"},
  "sdy": {
    "manual_computation", "return", "mesh", "sharding_constraint",
    "sharding_group", "propagation_barrier", "named_computation",
  },
}
# Targets of custom calls without side effects, as regular expressions.
_TARGETS = re.compile("|".join((
  # Libraries of one device.
  r"__(cublas|cudnn|cusolver|cub|onednn|rocblas|hipblas\w*|miopen)\$.*",
  r"lapack_\w+", r"(cu|hip)(solver|sparse|blas)_[a-z0-9_]+_ffi",
  r"(cu|hip)_(threefry2x32|lu_pivots_to_permutation|cholesky_update)(_ffi)?",
  r"cpu_csr_sparse_dense_ffi", r"tridiagonal_solve_perturbed_ffi",
  # Kernels of one GPU. Those of Mosaic GPU may write to others.
  r"__gpu\$(TopK|xla\.gpu\.triton)", r"xla\.gpu\.ext\.cub_\w+",
  r"__op\$block_scaled_\w+", r"triton_kernel_call(_ffi)?",
  # Kernels of this project (`parallel/kernels/cpu_calls.py`).
  r"paged_attention_(floats|codes)", r"coded_product",
  # XLA's own operations.
  r"TopK", r"mhlo\.topk", r"ApproxTopK", r"PartialReduce", r"PadToStatic",
  r"stablehlo\.dynamic_(approx_top_k|reduce_window|rng_bit_generator|top_k)",
  r"SliceToDynamic", r"SliceId", r"Resize\w+", r"X64\w+", r"ConcatBitcast",
  r"LayoutConstraint", r"AssumeGatherIndicesInBound",
  r"GatherScatterIndicesBitpacked", r"AsyncCollective(Start|Done)",
  r"PrepareAsyncCall(Start|Done)",  # the call is an instruction of its own
  r"Cholesky", r"Eigh(Tpu)?", r"LuDecomposition(Block)?",
  r"Qr(DecompositionBlock)?", r"ProductOfElementaryHouseholderReflectors",
  r"CompactWyHelper", r"InvertDiagBlocks(Lower|Upper)Triangular",
)))
# Targets whose side effects are known: annotations for the partitioner,
# buffers, placements in memory, assertions and callbacks to the host.
_EFFECTS = re.compile("|".join((
  r"Sharding", r"SPMD(FullToShard|ShardToFull)Shape", r"xla\.sdy\.\w+",
  r"AllocateBuffer", r"CreateBuffer", r"Pin", r"Unpin", r"PinToDevice(Sram)?",
  r"MoveTo(Host|Device)", r"annotate_device_placement", r"shape_assertion",
  r"dce_sink", r"control_dep",
  r"xla_((ffi|buffer)_)?(partitioned_)?python_(cpu|gpu)_callback",
)))
# Handlers of transfers to the host: callbacks of jax on TPUs.
HOST_HANDLERS = ("pjrt_rendezvous",)


def is_silent_opcode(name: str) -> bool:
  """Returns whether an HLO opcode is known not to communicate.

  Args:
    name: The opcode, without "-start", "-update" or "-done".
  """
  return name in _OPCODES


def is_silent_operation(name: str) -> bool:
  """Returns whether an MLIR operation is known not to communicate.

  Example:
    >>> [is_silent_operation(f"stablehlo.{name}") for name in ("add", "send")]
    [True, False]
  """
  dialect, _, short = name.partition(".")
  if dialect == "stablehlo":
    short = short.replace("_", "-")
    return short in _OPCODES or short in _STABLEHLO
  return dialect == "chlo" or short in _DIALECTS.get(dialect, ())


def is_silent_call(target: str, has_side_effect: bool, config: str) -> bool:
  """Returns whether a custom call is known not to communicate.

  Args:
    target: Target of the call.
    has_side_effect: Whether the program declares a side effect.
    config: Text that contains its backend config. Mosaic declares in it whether
      a TPU kernel communicates.

  Example:
    >>> is_silent_call("__cublas$gemm", False, "")
    True
    >>> is_silent_call("pfft3d", True, "")
    False
  """
  if target == "tpu_custom_call":
    return '"custom_call_config"' in config and not re.search(
      r'"has_communication":\s*true', config
    )
  if _EFFECTS.fullmatch(target):
    return True
  return not has_side_effect and _TARGETS.fullmatch(target) is not None

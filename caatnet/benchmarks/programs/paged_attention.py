"""Operands that each paged-attention kernel supports, by target."""

from collections.abc import Iterator
import itertools
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from caatnet.benchmarks.harness import setup, timing
from caatnet.show import tables
from parallel.axes import Axis, make_mesh
from parallel.collectives import varying
from parallel.kernels.paged_attention import api
from parallel.kernels.paged_attention.cases import Case
from parallel.xla import fingerprint, targets

# Column -> changes to the case of a row. Decoding is one new token of each
# sequence; a mixed step is a kernel that supports both.
_KINDS: dict[str, dict[str, Any]] = {
  "decode": {},
  "chunk": {"seqs": 2, "rows": 64},
  "window": {"window": 300},
  "int8 pages": {"stored": "int8", "page_size": 256},
  "2 lanes mapped": {},
}
_BASE = Case(
  seqs=8, rows=1, heads=0, kv_heads=0, width=0, page_size=128, pages=8,
  dtype="bfloat16", layers=4,
)


class _Target(NamedTuple):
  """Target to compile or lower for.

  Attributes:
    platform: "tpu" or "gpu".
    devices: One device of the target, or one of this machine.
    how: "compiled for ..." or "lowered for ...".
    missing: Reason for not compiling; "" if the case is compiled.
  """

  platform: str
  devices: list[jax.Device]
  how: str
  missing: str = ""


def run(config: Any) -> dict[str, Any]:
  """Tries all kernels on all targets; prints tables and returns plain data.

  Args:
    config: Config like configs/benchmark/paged_attention.py.

  Raises:
    ValueError: A target is not a TPU or GPU.
  """
  options = config.benchmark
  rows, missing, versions = [], {}, {}
  for name in options.targets:
    target = _resolve(name)
    if target.missing:
      missing[name] = target.missing
    else:
      versions[name] = fingerprint.versions(target.platform)
    cases = list(_cases(options, target.platform))
    found = [
      {"target": name} | _tried(target, *case)
      for case in timing.progress(cases, target.how)
    ]
    _print(target, found)
    rows += found
  return {
    "environment": setup.one_device(),
    "versions": versions, "missing": missing, "rows": rows,
  }


def _resolve(name: str) -> _Target:
  """Returns a target or, without its compiler, a platform to lower for."""
  platform = name.split(":")[0]
  if platform not in ("tpu", "gpu"):
    raise ValueError(
      f"config.benchmark.targets: {name!r} must be a TPU or GPU, such as "
      "tpu:v5p:2x2x1 or gpu:h200:1x1"
    )
  try:
    device = targets.resolve(name).devices[0]
  except ValueError as error:
    if "pip install" not in str(error):
      raise
    return _Target(
      platform, jax.devices()[:1], f"lowered for {platform}", str(error)
    )
  return _Target(platform, [device], f"compiled for {name}")


def _cases(options: Any, platform: str) -> Iterator[tuple[str, str, Case]]:
  for kernel, width, kv_heads, kind in itertools.product(
    api.KERNELS[platform], options.head_widths, options.kv_heads, _KINDS
  ):
    case = _BASE._replace(
      heads=max(8 // kv_heads, 1) * kv_heads, kv_heads=kv_heads, width=width,
      **_KINDS[kind],
    )
    yield kernel, kind, case


def _tried(
  target: _Target, kernel: str, kind: str, case: Case
) -> dict[str, Any]:
  """Compiles or lowers one case; the pages are declared to be finite."""
  # With two lanes, the kernel is called under `vmap`.
  lanes = 2 if "lanes" in kind else 1
  operands = case.types(api.ORDERS[kernel])
  found = {
    "kernel": kernel, "head_width": case.width, "kv_heads": case.kv_heads,
    "kind": kind, "takes": False, "why": "",
  }
  choice = api.choice(
    *operands[:3], window=case.window, finite=True,
    implementation=(kernel, "reference"),
  )
  if choice.refused:
    return found | {"why": choice.refused[kernel], "by": "refused"}

  def call(*operands):
    return api.paged_attention(
      *operands, window=case.window, finite=True, implementation=kernel
    )

  def body(*operands):
    q, pages, *others = jax.tree.map(lambda x: varying(x, "tensor"), operands)
    if lanes == 1:
      return call(*jax.tree.map(lambda x: x[0], (q, pages)), *others)[None]
    return jax.vmap(call, in_axes=(0, 0, None, None))(q, pages, *others)

  mesh = make_mesh({"tensor": Axis("tensor", lanes, 1)}, target.devices)
  q, pages, *others = operands
  q, pages = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((lanes, *x.shape), x.dtype), (q, pages)
  )
  mapped = jax.jit(jax.shard_map(
    body, mesh=mesh, in_specs=(P("tensor"), P("tensor"), P(), P()),
    out_specs=P("tensor"),
  ))
  try:
    platforms = None
    if target.missing:
      platforms = ("cuda" if target.platform == "gpu" else "tpu",)
    lowered = mapped.trace(q, pages, *others).lower(
      lowering_platforms=platforms
    )
    if target.missing:
      return found | {"takes": True, "by": "lowered"}
    memory = lowered.compile().memory_analysis()
  except Exception as error:  # any error of a kernel or its compiler
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    why = f"{type(error).__name__}: {(lines or ['no message'])[0][:160]}"
    return found | {"why": why, "by": "failed"}
  return found | {
    "takes": True, "by": "compiled",
    "temporary_bytes": memory.temp_size_in_bytes,
    "page_bytes": sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(pages)
    ),
  }


def _print(target: _Target, found: list[dict[str, Any]]) -> None:
  reasons: dict[str, str] = {}
  cells: dict[tuple[str, int, int], list[str]] = {}
  for each in found:
    key = each["kernel"], each["head_width"], each["kv_heads"]
    cell = "yes"
    if not each["takes"]:
      letter = reasons.setdefault(each["why"], f"{len(reasons) + 1}")
      cell = f"no [{letter}]"
    # Temporaries of this size mean a copy of the pages.
    elif each.get("temporary_bytes", 0) > each.get("page_bytes", 0) / 2:
      cell = "copies"
    cells.setdefault(key, []).append(cell)
  tables.table(
    f"attention over pages, {target.how}",
    ["kernel", "head width", "kv heads", *_KINDS],
    [
      [kernel, str(width), str(kv_heads), *row]
      for (kernel, width, kv_heads), row in cells.items()
    ],
  )
  for why, letter in reasons.items():
    print(f"[{letter}] {why}")
  if target.missing:
    print(f"lowered and not compiled: {target.missing}")

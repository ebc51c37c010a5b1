"""Loads programs of users by name, and reads their collectives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import importlib
import inspect
import os
import pathlib
import runpy
from typing import Any

import jax

from parallel.base import available, files
from parallel.base.report import Report
from parallel.ledger import calibration, profiles, reading, targets
from parallel.ledger.profiles import Events, MeasuredCollective
from parallel.ledger.reading import Reading
from parallel.ledger.sends.report import report
from parallel.plans.hardware import cluster_files

_ARGUMENTS = "example_args"

def read(
  program: str, devices: Sequence[jax.Device] = (), other: str = "",
) -> dict[str, Reading]:
  """Reads a program, or two.

  Args:
    program: ``package.module:function`` or ``path.py:function``, a function
      without arguments that returns ``(jitted function, arguments)``, where
      arguments may be `jax.ShapeDtypeStruct`; or a jitted function, whose
      module has ``example_args()`` for its arguments; or a path that
      `parallel.ledger.reading.read` accepts.
    devices: Devices to compile a function for, such as those of a
      `parallel.ledger.targets.Target`; () for those of this process.
    other: A second program; "" for none.

  Returns:
    Name -> reading; a folder may have several programs.

  Raises:
    ValueError: There is no such program, it does not return a jitted function
      and arguments, or it or its module raises a ValueError, as for too few
      devices: the message names ``--devices``. Other errors are not caught.
  """
  found = _read(program, devices)
  if other:
    # Programs of two dumps have equal names.
    found |= {
      f"{name} of {other}" if name in found else name: reading
      for name, reading in _read(other, devices).items()
    }
  return found


def measure_collectives(
  readings: Mapping[str, Reading], folder: str
) -> dict[str, list[MeasuredCollective]]:
  """Returns the measured times of a program's collectives.

  Args:
    readings: Compiled programs.
    folder: Folder of traces of `jax.profiler`; "" for none.

  Returns:
    Name -> measured collectives of each program that ran during the trace.

  Raises:
    ValueError: No program ran during the trace, or several have equal events.
  """
  if not folder:
    return {}
  return {
    name: profiles.measure_collectives(readings[name], events)
    for name, events in _events(readings, folder).items()
  }


def calibrate(
  readings: Mapping[str, Reading], folder: str, path: pathlib.Path
) -> str:
  """Fits rates to a profile, and writes a file that describes the cluster.

  Args:
    readings: Compiled programs.
    folder: Folder of traces of `jax.profiler`.
    path: File to write, for ``launch.compile`` and ``launch.plan``. In it, each
      device has an equal part of this process's memory limit.

  Returns:
    A sentence about the rates.

  Raises:
    ValueError: The path does not end in .json, the folder has no trace of the
      programs, or the trace lacks matrix products or other instructions.
  """
  if not folder:
    raise ValueError("--calibrate needs --profile")
  if path.suffix != ".json":  # as `cluster_files.cluster` requires
    raise ValueError(f"--calibrate={path} must end in .json")
  found = calibration.calibrate(
    [calibration.join_profile(readings[name], events)
     for name, events in _events(readings, folder).items()],
    path.stem, available.limit_bytes(),
  )
  files.replace(path, cluster_files.to_json(found.links))
  device = found.links.device
  return f"{path}: " + "; ".join([
    f"products {device.peak('') / 1e9:,.3f} GFLOP/s, memory "
    f"{device.memory_bandwidth / 1e9:,.3f} GB/s, with the rest of the step",
    *(f"{row['what']}: median error {row['residual']:.1%}"
      for row in found.rows if row["samples"]),
  ])


def _events(
  readings: Mapping[str, Reading], folder: str
) -> dict[str, Events]:
  """Returns the events of each program that ran during a trace."""
  found, events = {}, profiles.read_events(pathlib.Path(folder))
  for name, program in readings.items():
    program.check_timed(f"{name}: --profile")
    try:
      same = profiles.select_program_events(
        program, events.get(program.module.name, ())
      )
    except ValueError as error:
      raise ValueError(f"{folder}: {error}") from error
    if same is not None:
      found[name] = same
  if not found:
    raise ValueError(
      f"{folder} has no events of the programs {', '.join(readings)}; the "
      f"programs in the trace are {', '.join(sorted(events)) or 'nothing'}"
    )
  return found


def report_of_trace(
  programs: Mapping[Any, jax.stages.Compiled], mesh: jax.sharding.Mesh,
  folder: str | os.PathLike[str],
) -> Report:
  """Returns a report of the collectives of programs, with times from a trace.

  Args:
    programs: Key of a compiled program (`parallel.outer.base.Plan.variant`) ->
      the program, which ran during the trace.
    mesh: Mesh of the programs.
    folder: Folder of the trace.

  Raises:
    ValueError: Several programs ran whose events cannot be told apart.
  """
  found = {
    f"step (variant {variant})": reading.read(program, mesh=mesh)
    for variant, program in programs.items()
  }
  return report(found, measure_collectives(found, os.fspath(folder)))


def _read(program: str, devices: Sequence[jax.Device]) -> dict[str, Reading]:
  path = pathlib.Path(program)
  if path.is_dir():
    return reading.read_all(path)
  if path.suffix == ".py":
    raise ValueError(f"{program} must name a function, as in {program}:step")
  if ":" not in program or path.exists():
    return {program: reading.read(path)}
  with targets.patch_jax_devices(devices):  # modules may make meshes, too
    function = load_function(program, devices)
    with _add_devices_to_error(program, devices):
      found = function()
    try:
      jitted, args = found
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"{program} must return (jitted function, arguments), but returns "
        f"{type(found).__name__}"
      ) from error
    if not callable(getattr(jitted, "lower", None)):
      raise ValueError(
        f"{program} must return a function made by jax.jit, but returns "
        f"{type(jitted).__name__}"
      )
    named = isinstance(args, Mapping)
    lowered = jitted.lower(**args) if named else jitted.lower(*args)
  shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
  others = set().union(*(s.device_set for s in shardings if s)) - {*devices}
  if devices and others:
    raise ValueError(
      f"{program} must use the devices of --target: create its mesh in the "
      "function, with jax.make_mesh or jax.devices"
    )
  return {program: reading.read(lowered)}


@contextlib.contextmanager
def _add_devices_to_error(
  program: str, devices: Sequence[jax.Device]
) -> Iterator[None]:
  """Adds ``--devices`` to a ValueError, unless devices are given."""
  try:
    yield
  except ValueError as error:
    if devices:
      raise
    raise ValueError(
      f"{program} with --devices={jax.device_count()}: {error}"
    ) from error


def load_function(
  program: str, devices: Sequence[jax.Device] = (), arguments: int = 0
) -> Callable[..., Any]:
  """Returns the function of ``package.module:function``.

  Args:
    program: Module, or path of its file, and name of the function.
    devices: Devices for which its program is compiled; () for those of jax.
    arguments: Number of arguments that it takes.

  Raises:
    ValueError: There is no such function.
  """
  where, _, name = program.rpartition(":")
  is_file = where.endswith(".py")
  if is_file and not pathlib.Path(where).is_file():
    raise ValueError(f"{program}: the file {where} does not exist")
  if not is_file and not all(map(str.isidentifier, where.split("."))):
    raise ValueError(f"{program} must have the form package.module:function")
  try:
    with _add_devices_to_error(program, devices):  # the module may make a mesh
      names = (
        runpy.run_path(where) if is_file
        else vars(importlib.import_module(where))
      )
  except (ImportError, SyntaxError) as error:
    raise ValueError(f"{program}: {error}") from error
  if not callable(names.get(name)):
    functions = ", ".join(
      n for n, f in names.items()
      if callable(f) and getattr(f, "__module__", "") in (where, "<run_path>")
    )
    raise ValueError(
      f"{program}: {where} has no function {name!r}; it has {functions}"
    )
  if hasattr(names[name], "lower"):  # jitted: arguments come from elsewhere
    if not callable(arguments := names.get(_ARGUMENTS)):
      raise ValueError(
        f"{program} is a jitted function, so {where} must have a function "
        f"{_ARGUMENTS}() that returns its arguments as a tuple or a dict"
      )
    return lambda: (names[name], arguments())
  try:
    inspect.signature(names[name]).bind(*range(arguments))
  except (TypeError, ValueError) as error:  # ValueError: no signature
    what = "of a layout" if arguments else "without arguments"
    raise ValueError(
      f"{program} must be a function {what}: {error}"
    ) from error
  return names[name]

"""The flags that launch scripts share, and how a script is run.

A script says which of them it uses; another one is a mistake. A user's mistake
prints one line on stderr and exits with code 2; ``--debug`` shows the
traceback. jax is imported only after the flags have been checked.
"""

from collections.abc import Callable, Mapping, Sequence
import difflib
import os
import pathlib
import re
import runpy
import sys
import traceback
from typing import Any, NoReturn

from absl import flags, logging
import ml_collections
from ml_collections import config_flags

from caatnet import commands
from caatnet.config.schema import tree
from launch import overriding, processes

FLAGS = flags.FLAGS

config_flags.DEFINE_config_file(
  "config",
  None,
  "Config, PATH or NAME[:argument], as in caatnet/tiny:test; single keys: "
  "--config.sync.p=0.5",
  lock_config=True,
)
# ``config_flags`` would execute the file a second time.
_CONFIG = FLAGS["config"].parser = overriding.Loaded()
flags.DEFINE_bool(
  "help_config",
  False,
  "Print every key of the given config with its value, its allowed values and "
  "its meaning, and exit.",
)
flags.DEFINE_string(
  "workdir", None, "Folder of the run; runs/NAME of the config if unset."
)
flags.DEFINE_string(
  "mesh",
  "",
  "Devices per axis, e.g. data:2,tensor:4; an axis not named gets one. "
  "Unset: as many devices as the logical sizes can use.",
)
flags.DEFINE_integer(
  "cpu_devices", None, "Run on this many virtual CPU devices.", lower_bound=1
)
flags.DEFINE_string(
  "profile", "", "Steps to trace for Perfetto, FIRST:LAST, e.g. 10:13."
)
flags.DEFINE_bool(
  "json", False, "Print JSON, not tables: one object, or one for each prompt."
)
flags.DEFINE_bool("check", False, "Write nothing; what is stale is an error.")
flags.DEFINE_string(
  "output",
  "",
  "JSON file to write the result to, with command, date and versions. "
  "tokenizer: the folder to write; config.data.tokenizer if unset.",
)
flags.DEFINE_string(
  "plot",
  "",
  "PNG to write. evaluate: the loss at each position; compile: memory, bytes "
  "and overlap; simulate: the study's curves.",
)
flags.DEFINE_string(
  "report",
  "",
  "File to write the tables and the picture to: .html, or .md with a PNG.",
)
flags.register_validator(
  "report", lambda path: not path or path.endswith((".html", ".md")),
  "must end in .html or .md",
)
flags.DEFINE_string(
  "export",
  "",
  "File to write a schedule to, .xml for MSCCL, .json for a Chrome trace of "
  "its timeline.",
)
flags.DEFINE_integer(
  "step",
  None,
  "convert, evaluate, generate: checkpoint to read; the newest if unset. "
  "compile: whose program, from 0; one of each that the outer loop runs in a "
  "round if unset.",
  lower_bound=0,
)
flags.DEFINE_string("host", "127.0.0.1", "Address; 0.0.0.0 for all networks.")
flags.DEFINE_integer("port", 8000, "Port; 0 for any that is free.", 0, 65535)
flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of process 0, for several processes."
)
flags.DEFINE_integer("num_processes", None, "Number of processes.")
flags.DEFINE_integer("process_id", None, "This process's number, from 0.")

_SHARED = {f.name for f in FLAGS.flags_by_module_dict()[__name__]}

# Keys of the config of ``--workdir`` with the values that they get instead.
_OVERRIDES: list[str] = []

# Errors that tell users what to change; all others are ours.
_USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError,
                IsADirectoryError, NotADirectoryError, PermissionError,
                MemoryError)


def run(
  main: Callable[[], int | None],
  uses: Sequence[str],
  required: Sequence[str] = ("config",),
  defaults: Mapping[str, str] | None = None,
  changeable: Sequence[str] = (),
  devices: bool = True,
) -> NoReturn:
  """Parses the flags, sets the devices up, runs a script, and exits.

  Args:
    main: The script, which may return an exit code.
    uses: The shared flags that have an effect on it, beside ``--debug``.
    required: The flags without which it cannot run.
    defaults: Values of flags that the command line does not name.
    changeable: Of a script that reads the config of ``--workdir``: sections
      and keys of it that are flags all the same; see `overrides`.
    devices: Whether it computes with jax, which takes seconds to import.
  """
  script = sys.modules["__main__"]
  argv = list(sys.argv)
  code = _run(
    main, script, argv, uses, required, defaults or {}, changeable, devices
  )
  several = FLAGS.is_parsed() and FLAGS.coordinator is not None
  processes.leave(code, several)


def mesh() -> dict[str, int] | None:
  """Returns ``--mesh`` as {axis: devices}; None if it is not set."""
  return parse_mesh(FLAGS.mesh)


def overrides() -> str:
  """Returns what the command line changes in the config of ``--workdir``.

  It is what `caatnet.config.override` takes: ``SECTION.KEY=VALUE ...``.
  """
  return " ".join(_OVERRIDES)


def refuse_config(keys: Sequence[str], why: str) -> None:
  """Refuses flags of a config that would have no effect.

  Args:
    keys: How their keys begin; none for all flags of the config.
    why: Why they have none.

  Raises:
    ValueError: The command line has one.
  """
  for argument in sys.argv[1:]:
    match = re.match(r"--?config(?:$|=|\.([^=]*))", argument)
    if match and (not keys or (match[1] or "").startswith(tuple(keys))):
      raise ValueError(f"{argument} has no effect: {why}")


def profile() -> tuple[int, int] | None:
  """Returns ``--profile`` as (first step, step after the last), or None."""
  return parse_profile(FLAGS.profile)


def parse_mesh(text: str) -> dict[str, int] | None:
  """Reads ``"data:2,tensor:4"`` as ``{"data": 2, "tensor": 4}``, "" as None.

  Raises:
    ValueError: The text is not of this form, or names an axis twice.
  """
  if not text:
    return None
  parsed: dict[str, int] = {}
  for part in text.split(","):
    match = re.fullmatch(r"\s*([a-z_]+)\s*:\s*(\d+)\s*", part)
    if not match or int(match[2]) < 1:
      raise ValueError(
        f"--mesh={text}: {part!r} is not AXIS:DEVICES, as in data:2,tensor:4"
      )
    if match[1] in parsed:
      raise ValueError(f"--mesh={text} names the axis {match[1]!r} twice")
    parsed[match[1]] = int(match[2])
  return parsed


def parse_profile(text: str) -> tuple[int, int] | None:
  """Reads ``"10:13"`` as ``(10, 13)``, "" as None.

  Raises:
    ValueError: The text is not of this form.
  """
  if not text:
    return None
  match = re.fullmatch(r"(\d+):(\d+)", text)
  if not match or int(match[1]) >= int(match[2]):
    raise ValueError(
      f"--profile={text} is not FIRST:LAST with FIRST < LAST, as in 10:13"
    )
  return int(match[1]), int(match[2])


def split_overrides(
  argv: Sequence[str], changeable: Sequence[str]
) -> tuple[list[str], list[str]]:
  """Tells what changes a run's config from the other arguments.

  Args:
    argv: The arguments.
    changeable: Sections and keys of the config.

  Returns:
    The other arguments, and ``SECTION.KEY=VALUE`` of each change.

  Raises:
    ValueError: A key is not among those that can be changed.
  """
  rest, changes = [], []
  for argument in argv:
    match = re.match(r"--?config\.(([^=]*).*)", argument)
    if not match:
      rest.append(argument)
      continue
    if not any(f"{match[2]}.".startswith(f"{name}.") for name in changeable):
      raise ValueError(
        f"{argument}: of a run's config only "
        f"{', '.join(f'config.{name}' for name in changeable)} can be changed"
      )
    changes.append(match[1])
  return rest, changes


def _run(
  main, script, argv, uses, required, defaults, changeable, devices
) -> int:
  """Runs a script and returns its exit code."""
  # Read from the command line itself: parsing the flags may fail.
  debug = any(re.fullmatch("--?debug(=(1|t|true))?", a, re.I) for a in argv)
  try:
    if any(a in ("--help", "-h", "--helpshort", "-help") for a in argv):
      print(_help(script, uses, changeable, defaults))
      return 0
    for name, value in defaults.items():
      if not any(re.match(rf"--?{name}(=|$)", a) for a in argv[1:]):
        argv.insert(1, f"--{name}={value}")
    if changeable:
      argv, _OVERRIDES[:] = split_overrides(argv, changeable)
    if any(re.match("--?help_config(=|$)", a) for a in argv):
      required = ("config",)
    _parse(argv, uses, required)
    if FLAGS.help_config:
      print(tree.described(FLAGS.config))
      return 0
    if devices:
      _set_up_devices()
    return main() or 0
  except _USER_ERRORS as error:
    if debug:
      raise
    print(f"error: {commands.runnable(_one_line(error))}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    if debug:
      raise
    print("interrupted", file=sys.stderr)
    return 130
  except BrokenPipeError:  # who reads our output has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _parse(
  argv: list[str], uses: Sequence[str], required: Sequence[str]
) -> None:
  """Parses the flags; every mistake becomes a ``ValueError`` of one line."""
  for argument in argv[1:]:
    match = re.match(r"--?(?:no)?(\w+)", argument)
    if match and match[1] in _SHARED - _of_all(uses):
      raise ValueError(
        f"--{match[1]} has no effect on {pathlib.Path(argv[0]).stem} (--help "
        "lists its flags)"
      )
  value = _flag_value(argv, "config")
  if value is not None:
    path, _CONFIG.config = _load_config(value)
    overriding.prepare(argv[1:], path, _CONFIG.config)
  try:
    rest = FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    raise ValueError(_unknown_flag(error.flagname, uses)) from error
  except (flags.Error, AttributeError, KeyError, TypeError) as error:
    message = overriding.refused(_one_line(error), _CONFIG.config)
    raise ValueError(message) from error
  if FLAGS.config is not None:
    tree.check(FLAGS.config)
  if rest[1:]:
    raise ValueError(
      f"unexpected argument {rest[1]!r}; flags are --NAME=VALUE (--help)"
    )
  for name in required:
    if FLAGS[name].value is None:
      raise ValueError(f"--{name} is required (--help)")
  mesh(), profile()  # malformed values fail before anything is loaded
  several = [FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id]
  if (
    "coordinator" in uses and None in several
    and any(v is not None for v in several)
  ):
    raise ValueError(
      "--coordinator, --num_processes and --process_id go together"
    )
  address = FLAGS.coordinator
  if address is not None and not re.fullmatch(r".+:\d+", address):
    raise ValueError(f"--coordinator={address} is not HOST:PORT")


def _load_config(value: str) -> tuple[str, Any]:
  """Executes the file that ``--config`` names.

  absl would exit with code 0 if the file is missing, and show its own internals
  if the file is wrong.

  Args:
    value: The flag's value, PATH[:argument] or NAME[:argument].

  Returns:
    The path and the config.
  """
  name, _, argument = value.partition(":")
  path = commands.find_config(name)
  try:
    get_config = runpy.run_path(path).get("get_config")
    if get_config is None:
      raise ValueError(f"--config={path}: no get_config there")
    config = get_config(*([argument] if argument else []))
  except (ImportError, SyntaxError) as error:
    raise ValueError(f"--config={path}: {_one_line(error)}") from error
  except _USER_ERRORS:
    raise
  except (Exception, SystemExit) as error:
    # The innermost line of the config file itself, not of what it called.
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
             if f.filename == path]
    where = f", line {lines[-1]}" if lines else ""
    raise ValueError(
      f"--config={value}{where}: {type(error).__name__}: {_one_line(error)}"
    ) from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise ValueError(
      f"--config={path}: get_config returns {config!r}, not a ConfigDict"
    )
  return path, config


def _flag_value(argv: Sequence[str], name: str) -> str | None:
  """Returns the value of ``--name VALUE`` or ``--name=VALUE``, or None."""
  for index, argument in enumerate(argv):
    if re.fullmatch(rf"--?{name}", argument) and index + 1 < len(argv):
      return argv[index + 1]
    match = re.fullmatch(rf"--?{name}=(.*)", argument)
    if match:
      return match[1]
  return None


def _unknown_flag(name: str, uses: Sequence[str]) -> str:
  if name.startswith("config."):
    return f"--{name} needs --config=PATH"
  near = difflib.get_close_matches(name, _our_flags(uses), 1)
  hint = f"; did you mean --{near[0]}?" if near else " (--help lists them)"
  return f"unknown flag --{name}{hint}"


def _our_flags(uses: Sequence[str]) -> set[str]:
  """Returns the shared flags that a script uses and its own, not absl's."""
  by_module = FLAGS.flags_by_module_dict()
  modules = [sys.argv[0], "__main__"]
  own = {f.name for m in modules for f in by_module.get(m, [])}
  return own | _of_all(uses)


def _of_all(uses: Sequence[str]) -> set[str]:
  """Returns the shared flags of a script, with those that need no mention."""
  more = {"help_config"} if "config" in uses else set()
  return {"debug", *more, *uses}


def _help(
  script, uses: Sequence[str], changeable: Sequence[str],
  defaults: Mapping[str, str],
) -> str:
  """Returns the script's docstring and its flags."""
  lines = [(script.__doc__ or "").strip(), "", "flags:"]
  for name in sorted(_our_flags(uses)):
    flag = FLAGS[name]
    value = defaults.get(name, flag.default)
    default = "" if value in (None, "", False) else f" (default: {value})"
    lines.append(f"  --{name}\n      {flag.help}{default}")
  for name in changeable:
    lines.append(f"  --config.{name}\n      In place of the run's own.")
  return commands.runnable("\n".join(lines))


def _one_line(error: BaseException) -> str:
  """Returns an error's message as one line; its type if there is none."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return " ".join(lines) or type(error).__name__


def _set_up_devices() -> None:
  """Imports jax and tells it which devices and processes there are."""
  if FLAGS.cpu_devices:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if FLAGS.config is not None and FLAGS.config.get("kernels") == "interpret":
      # An interpreted kernel holds a thread of XLA's on each device, and needs
      # another one to be handed blocks of 100 KiB and more (jax 0.10): without
      # it, all wait forever. XLA has as many threads as this number says.
      threads = FLAGS.cpu_devices + (os.cpu_count() or 1)
      os.environ.setdefault("NPROC", str(threads))
  if not FLAGS.debug:  # what Orbax logs as an error it raises, too
    logging.set_verbosity(logging.FATAL)
  import jax

  if FLAGS.cpu_devices:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", FLAGS.cpu_devices)
  if FLAGS.coordinator:
    # Collectives between processes need gloo on CPUs.
    if (jax.config.jax_platforms or "cpu") == "cpu":
      jax.config.update("jax_cpu_collectives_implementation", "gloo")
    processes.initialize(
      FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id
    )

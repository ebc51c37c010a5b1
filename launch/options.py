"""Shared flags of launch scripts, and the entry point of a script.

Each script declares the shared flags that it uses; any other shared flag is an
error. An error that the user can correct prints one line on stderr and exits
with code 2; ``--debug`` shows the traceback. jax is imported only after the
flags have been checked.
"""

from collections.abc import Callable, Mapping, Sequence
import difflib
import gc
import importlib.util
import os
import pathlib
import re
import runpy
import sys
import traceback
from typing import Any, NamedTuple, NoReturn

from absl import flags, logging
import ml_collections
from ml_collections import config_flags

from caatnet import commands, interrupts
from caatnet.schema import tree
from launch import full_disks, overriding, processes
from parallel.base import atomic, lazy

FLAGS = flags.FLAGS

config_flags.DEFINE_config_file(
  "config",
  None,
  "Config, PATH or NAME[:argument], as in caatnet/tiny:test; single keys: "
  "--config.sync.p=0.5",
  lock_config=True,
)
# Without this parser, ``config_flags`` would execute the file a second time.
_CONFIG_PARSER = FLAGS["config"].parser = overriding.LoadedConfigParser()
flags.DEFINE_bool(
  "help_config",
  False,
  "Print every key of the given config with value, allowed values and "
  "documentation, and exit.",
)
flags.DEFINE_string(
  "workdir", None, "Folder of the run; runs/NAME of the config if unset."
)
flags.DEFINE_string(
  "mesh",
  "",
  "Devices per axis, e.g. data:2,tensor:4; other axes have one device. Unset: "
  "as many devices as the logical sizes can use.",
)
flags.DEFINE_integer(
  "cpu_devices", None, "Run on this many virtual CPU devices.", lower_bound=1
)
flags.DEFINE_string(
  "profile", "", "Steps FIRST to LAST - 1 to trace for Perfetto and to measure "
  "collectives in, as FIRST:LAST, e.g. 10:13.",
)
flags.DEFINE_string("program", None, "The program, also without --program=.")
flags.DEFINE_integer("devices", 1, "Number of virtual CPU devices.", 1, 4096)
flags.DEFINE_bool("json", False, "Print JSON instead of text and tables.")
flags.DEFINE_bool("check", False, "Write nothing; fail if output is stale.")
flags.DEFINE_string(
  "output", "", "JSON file for the result, with command, date and versions."
)
flags.DEFINE_string("plot", "", "PNG file for a picture of the result.")
flags.DEFINE_string(
  "report", "", "File for the tables and the picture: .html, or .md with a PNG."
)
flags.register_validator(
  "report", lambda path: not path or path.endswith((".html", ".md")),
  "must end in .html or .md",
)
flags.DEFINE_string(
  "export",
  "",
  "File for a schedule: .xml for MSCCL, .perfetto-trace for its timeline at "
  "https://ui.perfetto.dev (extra trace).",
)
flags.DEFINE_string(
  "tiers",
  "",
  "File of the host's memory tiers, or an example such as two-cxl; that of the "
  "config if unset.",
)
flags.DEFINE_integer(
  "step", None, "Step of the checkpoint to read; the newest if unset.", 0
)
flags.DEFINE_string(
  "target", None, "Machine to compile for, such as tpu:v5p:4x4x4."
)
flags.DEFINE_string(
  "cluster", "", "Cluster's file, or an example such as a100:16,uneven=1; "
  "config.planner.cluster if unset.",
)
flags.DEFINE_string(
  "compare", "",
  'Overrides of a second step, "config.sync.p=0.5 ...", to compare.',
)
flags.DEFINE_string("trace", "", "File to replay; conversations if unset.")
flags.DEFINE_integer("max_tokens", None, "Maximum tokens of an answer.", 1)
flags.DEFINE_string("host", "127.0.0.1", "Address; 0.0.0.0 for all networks.")
flags.DEFINE_integer("port", 8000, "Port; 0 for any free port.", 0, 65535)
flags.DEFINE_string(
  "programs",
  "~/.cache/caatnet/programs",
  "Folder of compiled programs, of which those read least recently are removed "
  "above 1 GB; JAX_COMPILATION_CACHE_DIR takes precedence.",
)
flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of process 0, for several processes."
)
flags.DEFINE_integer("num_processes", None, "Number of processes.")
flags.DEFINE_integer("process_id", None, "This process's number, from 0.")

_SHARED_FLAGS = {f.name for f in FLAGS.flags_by_module_dict()[__name__]}

# Shared flags of files that a script writes when its work is done.
_FILES = "output", "plot", "report", "export"

# Overrides of the config of ``--workdir``, ``SECTION.KEY=VALUE`` each.
_OVERRIDES: list[str] = []

# Flags that may be given an empty value.
_MAY_BE_EMPTY = "mesh", "profile", "prefix", "programs"

# Longest message of an error, in characters.
_MAX_CHARACTERS = 4000

# Errors that users can correct; all others are bugs and show a traceback.
_USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError,
                IsADirectoryError, NotADirectoryError, PermissionError,
                MemoryError)
# Messages of XLA about options that it does not have, or wrong values of them.
_XLA_OPTION = re.compile("No such compile option|While setting option xla_")


def run(
  main: Callable[[], int | None],
  uses: Sequence[str],
  required: Sequence[str] = ("config",),
  defaults: Mapping[str, str] | None = None,
  changeable: Sequence[str] = (),
  devices: bool = True,
  positional: str = "",
  writes: Sequence[str] = (),
  helps: Mapping[str, str] | None = None,
  reads_run: bool = False,
) -> NoReturn:
  """Parses the flags, sets up the devices, runs a script, and exits.

  Args:
    main: The script, which may return an exit code.
    uses: The shared flags of the script, in addition to ``--debug``.
    required: The required flags.
    defaults: Values of flags that are not on the command line.
    changeable: For a script that reads the config of ``--workdir``, the
      sections and keys that flags may override; see `overrides`.
    devices: Whether this module imports jax, which takes seconds, and sets up
      the devices.
    positional: Flag that may also be given without its name.
    writes: Flags, besides the shared ones, that name a file which the script
      writes; NAME/ for a folder. All paths are checked before the script runs.
    helps: Help texts of this script that replace those of shared flags.
    reads_run: Whether --workdir must hold a run, which is checked before jax is
      imported.
  """
  interrupts.install_with_watchdog()
  code = _run(main, _AcceptedFlags(
    uses, required, defaults or {}, changeable, devices, positional, writes,
    helps or {}, reads_run,
  ))
  several = FLAGS.is_parsed() and FLAGS.coordinator is not None
  if not several:  # several processes wait for each other at their exit
    interrupts.ignore()
  processes.exit_process(code, several)


def resume_gc(freeze: bool = False) -> None:
  """Resumes garbage collection; with `freeze`, it skips existing objects.

  A script with the flag ``--programs`` starts with garbage collection paused,
  and must call this after its set-up, whose modules and models are never freed:
  collections that examined them took 0.8 s of the 4.7 s until the first token
  of the demo's model.
  """
  if freeze:
    gc.freeze()
  gc.enable()


def mesh() -> dict[str, int] | None:
  """Returns ``--mesh`` as {axis: devices}; None if it is not set."""
  return parse_mesh(FLAGS.mesh)


def overrides() -> str:
  """Returns the command line's overrides of the config of ``--workdir``.

  The format is that of `caatnet.config.override`: ``SECTION.KEY=VALUE ...``.
  """
  return " ".join(_OVERRIDES)


def refuse_config(keys: Sequence[str], why: str) -> None:
  """Rejects config flags that would have no effect.

  Args:
    keys: Prefixes of the keys; () for all config flags.
    why: Reason, which the message has.

  Raises:
    ValueError: If the command line has such a flag.
  """
  for argument in sys.argv[1:]:
    match = re.match(r"--?config(?:$|=|\.([^=]*))", argument)
    if match and (not keys or (match[1] or "").startswith(tuple(keys))):
      raise ValueError(f"{argument} has no effect: {why}")


def profiled_steps() -> tuple[int, int] | None:
  """Returns ``--profile`` as (first step, step after the last), or None."""
  return parse_profile(FLAGS.profile)


def integers(name: str) -> list[int]:
  """Returns the items of a list flag as integers of at least 0.

  Raises:
    ValueError: An item is not an integer of 1 to 18 digits.
  """
  items = FLAGS[name].value or ()
  for item in items:
    if not re.fullmatch("[0-9]{1,18}", item.strip()):
      raise ValueError(
        f"--{name}={','.join(items)}: {item!r} is not an integer of at least "
        "0, as in 0,1"
      )
  return [int(item) for item in items]


def parse_mesh(text: str) -> dict[str, int] | None:
  """Parses ``"data:2,tensor:4"`` to ``{"data": 2, "tensor": 4}``, "" to None.

  Raises:
    ValueError: If the text has another form, or has an axis twice.
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
  """Parses ``"10:13"`` to ``(10, 13)``, "" to None.

  Raises:
    ValueError: If the text has another form.
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
  """Separates overrides of a run's config from other arguments.

  Args:
    argv: The arguments.
    changeable: Sections and keys that may be overridden.

  Returns:
    The other arguments, and ``SECTION.KEY=VALUE`` of each override.

  Raises:
    ValueError: If a key may not be overridden.
  """
  rest, changes = [], []
  for argument in argv:
    match = re.match(r"--?config\.(([^=]*).*)", argument)
    if not match:
      rest.append(argument)
      continue
    if not any(f"{match[2]}.".startswith(f"{name}.") for name in changeable):
      raise ValueError(
        f"{argument} has no effect: of a run's config, only "
        f"{', '.join(f'config.{name}' for name in changeable)} can be changed"
      )
    changes.append(match[1])
  return rest, changes


class _AcceptedFlags(NamedTuple):
  """Flags and paths that a script accepts: the arguments of `run`."""

  uses: Sequence[str]
  required: Sequence[str]
  defaults: Mapping[str, str]
  changeable: Sequence[str]
  devices: bool
  positional: str
  writes: Sequence[str]
  helps: Mapping[str, str]
  reads_run: bool


def _run(main: Callable[[], int | None], accepted: _AcceptedFlags) -> int:
  """Runs a script and returns its exit code."""
  script, argv = sys.modules["__main__"], list(sys.argv)
  uses, required = accepted.uses, accepted.required
  # Read from the command line, since parsing the flags may fail.
  debug = any(re.fullmatch("--?debug(=(1|t|true))?", a, re.I) for a in argv)
  try:
    if any(a in ("--help", "-h", "--helpshort", "-help") for a in argv):
      return _print_and_succeed(_help(script, accepted))
    for name, value in accepted.defaults.items():
      if not any(re.match(rf"--?{name}(=|$)", a) for a in argv[1:]):
        argv.insert(1, f"--{name}={value}")
    # With --config, overrides change that config instead of the run's.
    if accepted.changeable and _config_value(argv) is None:
      argv, _OVERRIDES[:] = split_overrides(argv, accepted.changeable)
    if any(re.match("--?help_config(=|$)", a) for a in argv):
      required = ("config",)  # no run, hence no other required flags
    _parse(argv, uses, required, accepted.positional)
    if FLAGS.help_config:
      return _print_and_succeed(
        commands.rewrite_commands(tree.help_text(FLAGS.config))
      )
    _check_paths(uses, accepted.writes)
    if accepted.reads_run and FLAGS.workdir:
      _check_run(FLAGS.workdir)
    if "programs" in uses:
      gc.disable()
    if accepted.devices:
      _set_up_devices(
        keep_programs="programs" in uses and not _needs_fresh_programs(uses)
      )
    with interrupts.interruptible():
      code = main() or 0
    assert gc.isenabled(), "the script has not called resume_gc"
    sys.stdout.flush()  # fails here if it is a file on a full disk
    return code
  except KeyboardInterrupt:
    if debug:
      traceback.print_exc()
    interrupts.end_process()
  except (BrokenPipeError, SystemExit) as error:  # stdout's reader has ended
    # rich replaces BrokenPipeError by SystemExit(1).
    if isinstance(error, SystemExit) and not isinstance(
      error.__context__, BrokenPipeError
    ):
      raise
    _discard_stdout()
    return 141
  except Exception as error:
    full = full_disks.describe_full_disk(error)
    absent = isinstance(error, ModuleNotFoundError) and lazy.install_hint(error)
    # An `OSError` that names a file is an error of its path.
    of_user = isinstance(error, _USER_ERRORS) or (
      isinstance(error, OSError) and error.filename is not None
    )
    option = _XLA_OPTION.search(str(error))
    if debug or not (full or absent or of_user or option):
      raise
    name = script.__spec__.name if script.__spec__ else argv[0]
    line = f"{name} {absent}" if absent else full or _one_line(error)
    if isinstance(error, MemoryError):  # its message names no key
      keys = [
        f"config.{key}={value}"
        for key, value in overriding.find_overrides(argv)
      ]
      line = f"out of memory with {' '.join(keys) or 'this config'}: {line}"
    if option:
      line = f"{line} (config.parallel.xla_options=NAME= removes an option)"
    line = commands.rewrite_commands(line)
    print(f"error: {line}", file=sys.stderr)
    if full:
      _discard_stdout()
    return 1 if full else 2
  finally:
    gc.enable()


def _print_and_succeed(text: str) -> int:
  """Prints a text, and returns an exit code of 0."""
  print(text, flush=True)
  return 0


def _discard_stdout() -> None:
  """Discards buffered output, which would fail again at exit."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(
  argv: list[str], uses: Sequence[str], required: Sequence[str],
  positional: str = "",
) -> None:
  """Parses the flags; every error becomes a ``ValueError`` of one line."""
  for argument in argv[1:]:
    match = re.match(r"--?(?:no)?(\w+)", argument)
    if match and match[1] in _SHARED_FLAGS - _with_implicit_flags(uses):
      raise ValueError(
        f"--{match[1]} has no effect on {pathlib.Path(argv[0]).stem} (--help "
        "lists its flags)"
      )
  value = _config_value(argv)
  if value is not None:
    path, _CONFIG_PARSER.config = _load_config(value)
    overriding.prepare(argv[1:], path, _CONFIG_PARSER.config)
  try:
    rest = FLAGS(argv)
    if positional and rest[1:] and FLAGS[positional].value is None:
      FLAGS[positional].parse(rest.pop(1))
  except flags.UnrecognizedFlagError as error:
    raise ValueError(_unknown_flag(error.flagname, uses)) from error
  except (flags.Error, AttributeError, KeyError, TypeError) as error:
    message = overriding.rewrite_absl_message(
      _one_line(error), _CONFIG_PARSER.config
    )
    raise ValueError(message) from error
  if FLAGS.config is not None:
    tree.check(FLAGS.config)
  if rest[1:]:
    raise ValueError(
      f"unexpected argument {rest[1]!r}; flags are --NAME=VALUE (--help)"
    )
  _check_values()
  for name in required:
    if FLAGS[name].value in (None, ""):
      raise ValueError(f"--{name} is required (--help)")
  # Malformed values fail before jax is loaded.
  mesh()
  if "config" in uses:  # in launch.sends, --profile is a folder
    profiled_steps()
  several = [FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id]
  if (
    "coordinator" in uses and None in several
    and any(v is not None for v in several)
  ):
    raise ValueError(
      "--coordinator, --num_processes and --process_id must be given together"
    )
  address = FLAGS.coordinator
  if address is not None and not re.fullmatch(r".+:\d+", address):
    raise ValueError(f"--coordinator={address} is not HOST:PORT")


def _check_values() -> None:
  """Raises ValueError for a flag that is given with an empty value.

  A shell passes an empty value for an unset variable: --workdir=$UNSET.
  """
  for name in FLAGS:
    flag = FLAGS[name]
    if not flag.present or name in _MAY_BE_EMPTY:
      continue
    if flag.value == "":
      raise ValueError(f"--{name}= is empty; give a value, or leave it out")
    if flag.flag_type() == "comma separated list of strings" and not (
      flag.value and all(item.strip() for item in flag.value)
    ):
      raise ValueError(
        f"--{name}={','.join(flag.value)} has an empty item; give values, as "
        "in A,B, or leave the flag out"
      )


def _check_paths(uses: Sequence[str], writes: Sequence[str]) -> None:
  """Raises ValueError if the script could not write to a path of its flags."""
  names = dict.fromkeys((x for x in _FILES if x in uses), False)
  names |= {x.rstrip("/"): x.endswith("/") for x in writes}
  for name, is_folder in names.items():
    if path := FLAGS[name].value:
      atomic.check_writable(path, f"--{name}=", is_folder)
  if "plot" in uses and FLAGS.plot and not importlib.util.find_spec(
    "matplotlib"
  ):
    raise ValueError(
      f'--plot={FLAGS.plot} needs matplotlib: pip install "caatnet[plot]"'
    )


def _check_run(workdir: str) -> None:
  """Raises FileNotFoundError for a local folder that holds no run."""
  path = pathlib.Path(workdir).expanduser()
  if "://" not in workdir and not (path / "config.json").exists():
    raise FileNotFoundError(
      f"--workdir={workdir} holds no run (config.json); launch.train and "
      "launch.convert write runs"
    )


def _load_config(value: str) -> tuple[str, Any]:
  """Executes the file of ``--config``.

  absl would exit with code 0 if the file is missing, and print a traceback of
  its internals if the file has an error.

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
      raise ValueError(f"--config={path} must define get_config")
    config = get_config(*([argument] if argument else []))
  except (ImportError, SyntaxError) as error:
    raise ValueError(f"--config={path}: {_one_line(error)}") from error
  except _USER_ERRORS:
    raise
  except (Exception, SystemExit) as error:
    # The innermost line of the config file, not of functions that it calls.
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
             if f.filename == path]
    where = f", line {lines[-1]}" if lines else ""
    raise ValueError(
      f"--config={value}{where}: {type(error).__name__}: {_one_line(error)}"
    ) from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise ValueError(
      f"--config={path}: get_config must return a ConfigDict, but returns "
      f"{config!r}"
    )
  return path, config


def _config_value(argv: Sequence[str]) -> str | None:
  """Returns the value of ``--config VALUE`` or ``--config=VALUE``, or None."""
  for index, argument in enumerate(argv):
    if re.fullmatch("--?config", argument) and index + 1 < len(argv):
      return argv[index + 1]
    if match := re.fullmatch("--?config=(.*)", argument):
      return match[1]
  return None


def _unknown_flag(name: str, uses: Sequence[str]) -> str:
  """Returns the error message for an unknown flag; it names a similar flag."""
  if name.startswith("config."):
    return f"--{name} needs --config=PATH"
  near = difflib.get_close_matches(name, _our_flags(uses), 1)
  hint = f"; did you mean --{near[0]}?" if near else " (--help lists them)"
  return f"unknown flag --{name}{hint}"


def _our_flags(uses: Sequence[str]) -> set[str]:
  """Returns the flags of a script, shared and own, without those of absl."""
  by_module = FLAGS.flags_by_module_dict()
  modules = [sys.argv[0], "__main__"]
  own = {f.name for m in modules for f in by_module.get(m, [])}
  return own | _with_implicit_flags(uses)


def _with_implicit_flags(uses: Sequence[str]) -> set[str]:
  """Returns the shared flags of a script, including the implicit ones."""
  more = {"help_config"} if "config" in uses else set()
  return {"debug", *more, *uses}


def _help(script: Any, accepted: _AcceptedFlags) -> str:
  """Returns the script's docstring and its flags."""
  lines = [(script.__doc__ or "").strip(), "", "flags:"]
  for name in sorted(_our_flags(accepted.uses)):
    flag = FLAGS[name]
    text = accepted.helps.get(name, flag.help)
    value = accepted.defaults.get(name, flag.default)
    default = f" (default: {value})" if value else ""
    lines.append(f"  --{name}\n      {text}{default}")
  for name in accepted.changeable:
    lines.append(f"  --config.{name}\n      Overrides the run's config.")
  return commands.rewrite_commands("\n".join(lines))


def _one_line(error: BaseException) -> str:
  """Returns an error's message as one line; its type if there is none.

  A long message, such as one that quotes a damaged file, is cut in the middle.
  """
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  text = " ".join(lines) or type(error).__name__
  if len(text) <= _MAX_CHARACTERS:
    return text
  half = _MAX_CHARACTERS // 2
  return f"{text[:half]} [...] {text[-half:]}"


def _needs_fresh_programs(uses: Sequence[str]) -> bool:
  """Returns whether the flags ask for a profile or dump of new programs."""
  # A profile is read by source lines, which may be outdated in a program from
  # the cache; XLA dumps only programs that it compiles.
  parallel = {} if FLAGS.config is None else FLAGS.config.get("parallel", {})
  return ("profile" in uses and bool(FLAGS.profile)) or (
    "xla_dump" in parallel.get("xla_options", "")
  )


def _set_up_devices(keep_programs: bool = False) -> None:
  """Imports jax and configures its devices, processes and program cache."""
  if FLAGS.cpu_devices:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if FLAGS.config is not None and FLAGS.config.get("kernels") == "interpret":
      # An interpreted kernel occupies one XLA thread per device, and needs
      # another one to receive blocks of 100 KiB and more (jax 0.10); without it
      # the program deadlocks. NPROC is the number of XLA threads.
      threads = FLAGS.cpu_devices + (os.cpu_count() or 1)
      os.environ.setdefault("NPROC", str(threads))
  if not FLAGS.debug:  # Orbax also raises what it logs as an error
    logging.set_verbosity(logging.FATAL)
  import jax

  if keep_programs:
    from parallel.ledger import persistent

    persistent.enable_compile_cache(FLAGS.programs)
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

"""Persistent compilation cache."""

import os

import jax

from parallel.ledger import persistent


def test_programs_are_kept_unless_xla_dumps_or_the_environment_has_a_folder(
  monkeypatch, tmp_path
):
  before = jax.config.jax_compilation_cache_dir
  min_s = jax.config.jax_persistent_cache_min_compile_time_secs
  found = []
  try:
    for environment, folder, xla_flags in (
      ("/elsewhere", "~/programs", ""), (None, "", ""),
      (None, "~/programs", "--xla_cpu_x=1 --xla_dump_to=dump"),
      (None, "~/programs", "--xla_cpu_x=1"),
    ):
      monkeypatch.setenv("XLA_FLAGS", xla_flags)
      monkeypatch.setenv("HOME", str(tmp_path))
      monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
      if environment is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", environment)
      persistent.enable_compile_cache(folder)
      found.append(jax.config.jax_compilation_cache_dir)
    # Programs that compile quickly are kept, too.
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_s)
  assert found == [before, before, before, str(tmp_path / "programs")]


def test_programs_that_were_read_least_recently_are_removed(
  monkeypatch, tmp_path
):
  monkeypatch.setattr(persistent, "_MAX_BYTES", 250)
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  before = jax.config.jax_compilation_cache_dir
  min_s = jax.config.jax_persistent_cache_min_compile_time_secs
  for name, read_s in {"a": 3, "b": 1, "c": 2}.items():
    path = tmp_path / f"{name}-cache"
    path.write_bytes(bytes(100))
    os.utime(path, (read_s, 0))
  (tmp_path / "notes").write_bytes(bytes(1000))  # not a program
  try:
    persistent.enable_compile_cache(str(tmp_path))
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_s)
  left = sorted(path.name for path in tmp_path.iterdir())
  assert left == ["a-cache", "c-cache", "notes"]

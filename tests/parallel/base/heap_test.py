"""Pages of freed arrays, in processes of their own."""

import subprocess
import sys

import pytest

# Prints the page faults of the second of two equal arrays, in a thread: heaps
# of other threads cannot hold arrays of this size.
_SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
from resource import RUSAGE_SELF, getrusage
import sys
from parallel.base import heap

def faults(size):
  before = getrusage(RUSAGE_SELF).ru_minflt
  b"x" * size
  return getrusage(RUSAGE_SELF).ru_minflt - before

if "keep" in sys.argv and not heap.keep_freed_memory():
  sys.exit("not kept")
with ThreadPoolExecutor(1) as pool:
  _, second = pool.map(faults, [100 << 20] * 2)
print(second)
"""


def _faults(*arguments, **environment):
  done = subprocess.run(
    [sys.executable, "-c", _SCRIPT, *arguments], capture_output=True, text=True,
    # The allocator's options of the tests would add huge pages.
    env={"PYTHONPATH": ":".join(sys.path)} | environment,
  )
  if "not kept" in done.stderr:
    return None
  assert done.returncode == 0, done.stderr
  return int(done.stdout)


def test_pages_of_freed_arrays_are_kept_for_later_ones():
  if _faults() < 20_000:  # of 25,600 pages of 4 KiB
    pytest.skip("pages are larger than 4 KiB")
  faults = _faults("keep")
  if faults is None:
    pytest.skip("the C library has no such options")
  assert faults < 100


@pytest.mark.parametrize("options", [
  {"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
])
def test_options_of_the_environment_have_precedence(options):
  assert _faults("keep", **options) is None

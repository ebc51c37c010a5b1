r"""Writes the texts of one program as a version of jax makes them.

  PYTHON tests/parallel/ledger/versions_program.py FOLDER

PYTHON needs nothing but jax. The files are VERSION-PARTITIONER.stablehlo.txt,
as lowered, and VERSION-shardy.hlo.txt, as compiled for eight CPU devices.
Environments with 0.10.2 and 0.12.0.1 wrote those here; 0.11.2 writes the same
StableHLO as 0.12.0.1.
"""

import pathlib
import sys

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROOT = pathlib.Path(__file__).parents[3]
SIZES = {"data": 2, "model": 4}
ROWS, WIDTH, HIDDEN, LAYERS = 16, 32, 64, 3
PARTITIONER = "jax_use_shardy_partitioner"


def step():
  """Returns a jitted program and its arguments.

  Explicit collectives of each kind in a loop, and a product whose sum over
  "model" the partitioner adds. Rows are ``[ROWS, WIDTH]``, bfloat16.
  """
  mesh = jax.make_mesh(
    tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2
  )

  def layer(x, _):  # [ROWS / 2, WIDTH] on a device
    x = lax.psum(x, "model")
    x = lax.psum_scatter(x, "model", tiled=True)
    x = lax.all_to_all(x, "model", 1, 0, tiled=True)
    x = lax.all_to_all(x, "model", 0, 1, tiled=True)
    x = lax.all_gather(x, "model", tiled=True)
    x = lax.ppermute(x, "data", [(0, 1), (1, 0)])
    return jnp.tanh(x), None

  layers = jax.shard_map(
    lambda x: lax.scan(layer, x, None, length=LAYERS)[0], mesh=mesh,
    in_specs=P("data"), out_specs=P("data"), check_vma=False,
  )

  def program(x, hidden, down):
    return layers(x) + hidden @ down  # product

  def array(shape, *spec):
    return jax.ShapeDtypeStruct(
      shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec))
    )

  return jax.jit(program), (
    array((ROWS, WIDTH), "data"), array((ROWS, HIDDEN), "data", "model"),
    array((HIDDEN, WIDTH), "model"),
  )


def main(folder):
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 8)
  partitioners = {"shardy": True, "gspmd": False}
  if not hasattr(jax.config, PARTITIONER):
    partitioners = {"shardy": None}
  for name, value in partitioners.items():
    if value is not None:
      jax.config.update(PARTITIONER, value)
    f, arguments = step()
    lowered = f.lower(*arguments)
    texts = {"stablehlo": lowered.as_text(debug_info=True)}
    if name == "shardy":
      texts["hlo"] = lowered.compile().as_text()
    for kind, text in texts.items():
      path = pathlib.Path(folder, f"{jax.__version__}-{name}.{kind}.txt")
      path.write_text(text.replace(f"{ROOT}/", ""))


if __name__ == "__main__":
  main(sys.argv[1])

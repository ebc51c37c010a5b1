"""``config.parallel`` and ``config.pipeline``."""

from caatnet.schema.fields import COUNT, COUNT_OR_NONE, field, section


@section
class Parallel:
  """Logical sizes of the axes; ``--mesh`` assigns devices to them."""

  worker: int = field(
    1, "Workers: groups of ranks with separate parameters.", COUNT
  )
  data: int = field(1, "Data-parallel ranks of a worker.", COUNT)
  stage: int = field(
    1,
    "Pipeline stages, each with a part of the layers; more than one requires "
    "the section pipeline.",
    COUNT,
  )
  tensor: int = field(8, "Tensor ranks.", COUNT)
  device_order: tuple[int, ...] = field(
    (), "Index in jax.devices() of each position of the mesh, whose axes are "
    "worker, data (outermost level first), stage and tensor, in row-major "
    "order, as recommended by launch.plan; () for jax's order.", COUNT_OR_NONE,
  )
  xla_options: str = field(
    "", 'XLA options of steps of training and inference, "NAME=VALUE '
    'NAME=VALUE", which are added to those of the devices '
    "(parallel/ledger/compiler_options.py) or replace their values; no value "
    "removes an option.",
  )


@section
class Pipeline:
  """Pipeline schedule of ``config.train.accumulation`` microbatches."""

  schedule: str = field(
    "1f1b", 'Pipeline schedule: "gpipe", "1f1b", "eager_1f1b", '
    '"interleaved_1f1b", "looped", "zb_h1", "zb_h2", "zb_v" or "dualpipe_v" '
    "(`parallel.plans.pipeline.builders`).",
  )
  chunks: int = field(
    1, 'Model chunks per stage, for "interleaved_1f1b" and "looped"; 2 for '
    '"zb_v" and "dualpipe_v".', COUNT
  )
  vocabulary: str = field(
    "sharded",
    'Placement of embedding and head: "sharded" over the stages, which compute '
    'them together, or "replicated", with the results of the first and the '
    "last stage.",
    ("sharded", "replicated"),
  )
  keep: str = field(
    "inputs", 'Activations stored for the backward: "inputs" of chunks, whose '
    'forward is then recomputed, or "residuals", subject to '
    'config.model.remat. Split backwards ("zb_h1", "zb_h2", "zb_v", '
    '"dualpipe_v") are only faster '
    "with residuals.", ("inputs", "residuals"),
  )

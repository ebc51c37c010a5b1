"""``config.parallel`` and ``config.pipeline``."""

from caatnet.schema.fields import COUNT, COUNT_OR_ZERO, field, section


@section
class Parallel:
  """Logical sizes of the axes; ``--mesh`` assigns devices to them."""

  worker: int = field(
    1, "Workers: groups of ranks with separate parameters.", COUNT
  )
  data: int = field(1, "Data-parallel ranks per worker.", COUNT)
  stage: int = field(
    1, "Pipeline stages, each with a part of the layers; more than one "
    "requires the section pipeline.", COUNT,
  )
  tensor: int = field(8, "Tensor-parallel ranks.", COUNT)
  device_order: tuple[int, ...] = field(
    (), "Index in jax.devices() of each position of the mesh in row-major "
    "order, as recommended by launch.plan; the mesh's axes are worker, data "
    "(outermost level first), stage, tensor. () for jax's order.",
    COUNT_OR_ZERO,
  )
  xla_options: str = field(
    "", 'XLA options of training and inference steps, "NAME=VALUE NAME=VALUE". '
    "They are added to the default options of the platform "
    "(parallel/ledger/compiler_options.py) or replace them; an empty value "
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
    "sharded", 'Placement of embedding and head: "sharded" over the stages, '
    'which compute them together, or "replicated" on all stages, of which the '
    "first uses the embedding and the last uses the head.",
    ("sharded", "replicated"),
  )
  keep: str = field(
    "inputs", 'Activations stored for the backward: "inputs" of chunks, whose '
    'forward is then recomputed, or "residuals", all that config.model.remat '
    'does not recompute. Schedules with split backwards ("zb_h1", "zb_h2", '
    '"zb_v", "dualpipe_v") are only faster '
    'with "residuals".', ("inputs", "residuals"),
  )

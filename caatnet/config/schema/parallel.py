"""``config.parallel`` and ``config.pipeline``."""

from caatnet.config.schema.fields import COUNT, COUNT_OR_NONE, field, section


@section
class Parallel:
  """Logical sizes of the axes; ``--mesh`` assigns devices to them."""

  worker: int = field(1, "Workers: ranks with parameters of their own.", COUNT)
  data: int = field(1, "Data-parallel ranks of a worker.", COUNT)
  stage: int = field(
    1,
    "Stages of a pipeline, each with some of the layers; more than one needs "
    "the section pipeline.",
    COUNT,
  )
  tensor: int = field(8, "Tensor ranks.", COUNT)
  device_order: tuple[int, ...] = field(
    (), "Number in jax.devices() of each place of the mesh, whose axes are "
    "worker, data (outermost level first), stage and tensor, the last one "
    "fastest, as a plan advises; () leaves the order to jax.", COUNT_OR_NONE,
  )


@section
class Pipeline:
  """Timetable of the stages; ``config.train.accumulation`` is microbatches."""

  timetable: str = field(
    "1f1b", 'Order of the work: "gpipe", "1f1b", "eager_1f1b", '
    '"interleaved_1f1b", "looped", "zb_h1" or "zb_h2" '
    "(`parallel.pipeline.builders`).",
  )
  chunks: int = field(
    1, 'Parts of a stage, for "interleaved_1f1b" and "looped".', COUNT
  )
  vocabulary: str = field(
    "sharded",
    'Place of embedding and head: "sharded" over the stages, which compute '
    'them together, or "replicated", where the results of the first and the '
    "last stage count.",
    ("sharded", "replicated"),
  )
  keep: str = field(
    "inputs", 'What a forward keeps for the backward: "inputs" of parts, whose '
    'forward is then computed again, or "residuals", as many as '
    'config.model.remat says. Halved backwards ("zb_h1", "zb_h2") are only '
    "faster with residuals.", ("inputs", "residuals"),
  )

"""Config of the study of pipeline schedules."""

from caatnet.schema import register
from caatnet.schema.fields import BYTES, COUNT, POSITIVE, field, section
from caatnet.studies.keys import study_key


@register.study
class Pipeline:
  """Pipeline schedules: bubble, memory, bytes and time."""

  @section
  class Stages:
    """Sizes of the pipeline."""

    stages: int = field(4, "Number of stages.", COUNT)
    microbatches: int = field(8, "Microbatches of a step.", COUNT)
    chunks: int = field(
      2, "Model chunks per stage, for schedules that allow several.", COUNT
    )
    schedule: str = field(
      "1f1b", "Pipeline schedule whose timeline --export writes."
    )

  @section
  class Work:
    """Seconds of a stage for a microbatch, summed over the stage's chunks."""

    forward_s: float = field(0.01, "Seconds of the forward.", POSITIVE)
    input_s: float = field(
      0.01, "Seconds of the backward for inputs.", POSITIVE
    )
    weight_s: float = field(
      0.01, "Seconds of the backward for weights.", POSITIVE
    )
    factors: tuple[float, ...] = field(
      (), "Each stage's factor on the times; () for equal stages.", POSITIVE
    )
    recompute: bool = field(
      False, "Whether a backward, or each half of a split backward, recomputes "
      "the forward first.",
    )

  @section
  class Link:
    """Links between stages."""

    bandwidth: str = field(
      "infiniband_ndr", "Bytes per second, or a kind of link of "
      "parallel/plans/hardware/links.py.",
    )
    latency_s: str = field(
      "5e-6", "Seconds, or a kind of link of parallel/plans/hardware/links.py."
    )
    overlap: bool = field(
      True, "Whether sends overlap with the stage's compute."
    )

  name: str = field("schedules", "Name of the config.")
  study: str = study_key("pipeline")
  schedules: tuple[str, ...] = field(
    ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped", "zb_h1",
     "zb_h2", "zb_v", "dualpipe_v"),
    "Names of builders in parallel/plans/pipeline/builders.py.",
  )
  pipeline: Stages = field(Stages, "Sizes of the pipeline.")
  work: Work = field(Work, "Times of a microbatch.")
  link: Link = field(Link, "Links between stages.")
  boundary_bytes: int = field(
    64 * 2**20,
    "Bytes of activations of a microbatch that one chunk sends to the next.",
    BYTES,
  )
  activation_bytes: int = field(
    2 * 2**30, "Bytes of a microbatch's stored activations per stage, over all "
    "chunks.", BYTES,
  )

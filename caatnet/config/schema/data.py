"""``config.data``: a section for each kind of data."""

from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  Range,
  field,
  section,
)

_PERCENT = Range(0, 100, above=True, below=True)


@section
class Text:
  """Text, for language models."""

  path: str = field(
    "", 'A .txt or .jsonl file or a folder of them; "" for the source of '
    "Python's standard library.",
  )
  tokenizer: str = field(
    "", 'A tokenizer.json or a folder that has one; "" for tokens that are '
    "bytes. The model's vocab_size must be more than its largest token.",
  )
  seq_len: int = field(256, "Tokens per sequence.", COUNT)
  batch_size: int = field(
    16, "Sequences per step, over all workers and data-parallel ranks.", COUNT
  )
  validation_percent: float = field(
    5.0, "Expected share of the documents that is held out, in percent.",
    _PERCENT,
  )
  validation_path: str = field(
    "", "File or folder to validate on, instead of a share of path; "
    '"" for none.',
  )
  validation_windows: int = field(
    256, "Windows of seq_len that every evaluation reads; 0 for all.",
    COUNT_OR_NONE,
  )


@section
class Images:
  """Labelled images, for classifiers."""

  path: str = field(
    "", 'An .npz file with "images", uint8 or float [N, H, W] or [N, H, W, C], '
    'and "labels", int [N]; "" for scikit-learn\'s digits.',
  )
  shape: tuple[int, int, int] = field(
    (8, 8, 1), "Height, width and channels of an image.", COUNT
  )
  num_classes: int = field(
    10, "Number of classes; labels are 0 to num_classes - 1.", COUNT
  )
  batch_size: int = field(
    64, "Images per step, over all workers and data-parallel ranks.", COUNT
  )
  validation_percent: float = field(
    20.0, "Expected share of the images that is held out, in percent.", _PERCENT
  )
  validation_path: str = field(
    "", 'File to validate on, instead of a share of path; "" for none. Images '
    "that are in both are not trained on.",
  )


@section
class Graphs:
  """Labelled nodes of a graph, for graph networks."""

  path: str = field(
    "", 'Folder that launch.graph wrote; "" for 65,536 nodes in planted '
    "communities.",
  )
  num_features: int = field(16, "Features of a node.", COUNT)
  num_classes: int = field(
    8, "Number of classes; labels are 0 to num_classes - 1.", COUNT
  )
  fanouts: tuple[int, ...] = field(
    (10, 5), "Sampled neighbours, level by level; a model has as many layers.",
    COUNT,
  )
  batch_size: int = field(
    256, "Nodes per step, over all workers and data-parallel ranks.", COUNT
  )
  validation_nodes: int = field(
    4096, "Nodes that every evaluation reads; 0 for all.", COUNT_OR_NONE
  )
  sampler: str = field(
    "auto",
    'Sampler: "compiled" (by numba, the extra graphs), "reference" (numpy), or '
    '"auto" for the first where it is installed. Both draw the same '
    "neighbours.",
  )
  threads: int = field(
    0, "Threads of the compiled sampler; 0 for one per core.", COUNT_OR_NONE
  )
  access: str = field(
    "auto",
    'Path of features to the devices: "cpu_gather" (through a buffer of the '
    'host), "device" (they read the host\'s pinned memory), "sharded" (every '
    'device has a share), or "auto" for the first two, whichever moves fewer '
    "bytes.",
  )
  cache_rows: int = field(0, "Rows that stay on every device.", COUNT_OR_NONE)
  cache: str = field(
    "degree", 'Choice of these rows: those of the most edges ("degree"), or '
    'those that sampled batches read most ("presampling").',
  )
  ahead: int = field(
    1, "Batches that the host makes while the present step runs.", COUNT_OR_NONE
  )


DATA = {"text": Text, "images": Images, "graphs": Graphs}

"""``config.data``: one section per kind of data."""

from caatnet.schema.fields import COUNT, COUNT_OR_NONE, Range, field, section

_PERCENT = Range(0, 100, above=True, below=True)


@section
class Text:
  """Text, for language models."""

  path: str = field(
    "", 'A .txt or .jsonl file or a folder of them; "" for the source of '
    "Python's standard library.",
  )
  tokenizer: str = field(
    "", 'A tokenizer.json or a folder that has one; "" for byte tokens. '
    "config.model.vocab_size must be more than the largest token.",
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
    "", "File or folder of the validation text, instead of a share of path; "
    '"" for none.',
  )
  validation_windows: int = field(
    256, "Windows of seq_len tokens per evaluation; 0 for all.",
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
  enlarge: bool = field(
    False, "Whether smaller images are enlarged to shape by whole factors: "
    "pixels are repeated, and a single channel is copied.",
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
    "", 'File of validation images, instead of a share of path; "" for none. '
    "They are removed from the training images.",
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
    (10, 5), "Sampled neighbours per node of each level; the model has one "
    "layer per level.", COUNT,
  )
  batch_size: int = field(
    256, "Nodes per step, over all workers and data-parallel ranks.", COUNT
  )
  validation_nodes: int = field(
    4096, "Nodes per evaluation; 0 for all.", COUNT_OR_NONE
  )
  sampler: str = field(
    "auto",
    'Sampler: "compiled" (by numba, the extra graphs), "reference" (numpy), or '
    '"auto" for "compiled" if numba is installed. Both draw the same '
    "neighbours.",
  )
  threads: int = field(
    0, "Threads of the compiled sampler; 0 for one per core.", COUNT_OR_NONE
  )
  access: str = field(
    "auto",
    'Path of features to the devices: "cpu_gather" (through a buffer of the '
    'host), "device" (devices read the host\'s pinned memory), "sharded" '
    '(every device has a share of the rows), or "auto" for the one of the '
    "first two that moves fewer bytes.",
  )
  cache_rows: int = field(
    0, "Rows of features that are cached on every device.", COUNT_OR_NONE
  )
  cache: str = field(
    "degree", 'Selection of these rows: nodes with the most edges ("degree"), '
    'or rows that sampled batches read most often ("presampling").',
  )
  ahead: int = field(
    1, "Batches that the host prefetches.", COUNT_OR_NONE
  )


DATA = {"text": Text, "images": Images, "graphs": Graphs}

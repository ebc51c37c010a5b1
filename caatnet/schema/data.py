"""``config.data``: one section per kind of data."""

from caatnet.schema.fields import COUNT, COUNT_OR_ZERO, Range, field, section

_PERCENT = Range(0, 100, above=True, below=True)


@section
class Text:
  """Text, for language models."""

  path: str = field(
    "", 'A .txt or .jsonl file, or a folder of such files; "" for the source '
    "code of Python's standard library.",
  )
  tokenizer: str = field(
    "", 'A tokenizer.json or a folder that has one; "" for byte tokens. '
    "config.model.vocab_size must exceed the largest token id.",
  )
  seq_len: int = field(256, "Tokens per sequence.", COUNT)
  batch_size: int = field(
    16, "Sequences per step, over all workers and data-parallel ranks.", COUNT
  )
  validation_percent: float = field(
    5.0, "Percentage of the documents that are held out for validation, on "
    "average: a hash of a document's text decides.", _PERCENT,
  )
  validation_path: str = field(
    "", "File or folder of validation text, whose documents are removed from "
    'the training text; "" to hold out validation_percent of path.',
  )
  validation_windows: int = field(
    256, "Windows of seq_len tokens per evaluation; 0 for all.", COUNT_OR_ZERO
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
    False, "Whether smaller images are enlarged to config.data.shape by "
    "integer factors: pixels are repeated, and a single channel is copied.",
  )
  num_classes: int = field(
    10, "Number of classes; labels are 0 to num_classes - 1.", COUNT
  )
  batch_size: int = field(
    64, "Images per step, over all workers and data-parallel ranks.", COUNT
  )
  validation_percent: float = field(
    20.0, "Percentage of the images held out for validation, on average.",
    _PERCENT,
  )
  validation_path: str = field(
    "", "An .npz file of validation images, which are removed from the "
    'training images; "" to hold out validation_percent of path.',
  )


@section
class Graphs:
  """Labelled nodes of a graph, for graph networks."""

  path: str = field(
    "", 'Folder of a graph that launch.graph wrote; "" for a synthetic graph '
    "of 65,536 nodes in planted communities.",
  )
  num_features: int = field(16, "Features of a node.", COUNT)
  num_classes: int = field(
    8, "Number of classes; labels are 0 to num_classes - 1.", COUNT
  )
  fanouts: tuple[int, ...] = field(
    (10, 5), "Neighbours sampled per node at each distance from the nodes of "
    "the batch, nearest first; the model has one layer per number.", COUNT,
  )
  batch_size: int = field(
    256, "Nodes per step, over all workers and data-parallel ranks.", COUNT
  )
  validation_nodes: int = field(
    4096, "Nodes per evaluation; 0 for all.", COUNT_OR_ZERO
  )
  sampler: str = field(
    "auto", 'Sampler of neighbours: "compiled" (by numba, in the optional '
    'dependencies "graphs"), "reference" (numpy), or "auto" for "compiled" if '
    "numba is installed. Both sample the same neighbours.",
  )
  threads: int = field(
    0, "Threads of the compiled sampler; 0 for one per core.", COUNT_OR_ZERO
  )
  access: str = field(
    "auto", 'Method by which devices read node features: "cpu_gather" (the CPU '
    'gathers rows into a host buffer, which is copied), "device" (devices read '
    'pinned host memory), "sharded" (rows are distributed over the devices), '
    'or "auto" for the one of the first two that moves fewer bytes.',
  )
  cache_rows: int = field(
    0, "Rows of features that are cached on every device.", COUNT_OR_ZERO
  )
  cache: str = field(
    "degree", 'Selection of the cached rows: nodes with most edges ("degree"), '
    'or rows that sampled batches read most often ("presampling").',
  )
  ahead: int = field(1, "Batches that the host prefetches.", COUNT_OR_ZERO)


DATA = {"text": Text, "images": Images, "graphs": Graphs}

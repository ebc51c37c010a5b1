"""``config.graph``: one section per source of a graph."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  FRACTION,
  NOT_NEGATIVE,
  SEED,
  Range,
  field,
  section,
)

_UNDIRECTED_DOC = "Whether each edge is used in both directions."
SCALE = Range(1, 30, whole=True)


@section
class GeneratedGraph:
  """Keys common to generated graphs."""

  num_features: int = field(128, "Features of a node.", COUNT)
  num_classes: int = field(
    8, "Number of labels; node v has the label v % num_classes.", COUNT
  )
  signal: float = field(
    1.0, "Norm of the mean feature vector of a label, in units of the standard "
    "deviation of the noise.", NOT_NEGATIVE,
  )
  seed: int = field(0, "Seed of all random numbers.", SEED)


@section
class RMAT(GeneratedGraph):
  """R-MAT graph: a random graph with a skewed distribution of degrees."""

  scale: int = field(16, "The graph has 2^scale nodes.", SCALE)
  num_edges: int = field(
    1_000_000, "Edges, including duplicates.", COUNT_OR_ZERO
  )
  quarters: tuple[float, ...] = field(
    (0.57, 0.19, 0.19), "Probabilities a, b and c of three quadrants of the "
    "adjacency matrix; d is the rest.", FRACTION,
  )


@section
class Communities(GeneratedGraph):
  """Random graph of planted communities; a node's label is its community."""

  num_nodes: int = field(65_536, "Number of nodes.", COUNT)
  mean_degree: float = field(
    15.0, "Mean of the number of neighbours, a Poisson variable.", NOT_NEGATIVE
  )
  inside: float = field(
    0.6, "Probability that a neighbour is in the same community.", FRACTION
  )


@section
class Edges:
  """Graph read from a text file of edges, with .npy files for the nodes."""

  path: str = field("", "Text file with a pair of nodes per edge.")
  features: str = field("", "An .npy file of the nodes' features.")
  labels: str = field("", "An .npy file of the nodes' labels.")
  undirected: bool = field(False, _UNDIRECTED_DOC)


@section
class Npz:
  """Graph read from an .npz file."""

  path: str = field("", "The .npz file.")
  undirected: bool = field(False, _UNDIRECTED_DOC)


@section
class OGB:
  """Dataset of the Open Graph Benchmark (OGB)."""

  path: str = field("", "Folder that the package ogb has unpacked.")
  undirected: bool = field(False, _UNDIRECTED_DOC)


SOURCES = {
  "rmat": RMAT, "communities": Communities, "edges": Edges, "npz": Npz,
  "ogb": OGB,
}

"""The sections of graph networks and their data; see `configs.sections`."""

import ml_collections

ConfigDict = ml_collections.ConfigDict


def graph() -> ConfigDict:
  """Returns a graph network, with a layer for each of the data's fan-outs."""
  model = ConfigDict()
  model.name = "graph"
  # The kind of layers: "sage" (GraphSAGE, mean) or "gcn".
  model.layer = "sage"
  # The channels of states between layers.
  model.width = 64
  # The dtype of activations; parameters are float32.
  model.dtype = "float32"
  return model


def graphs() -> ConfigDict:
  """Returns a graph's labelled nodes, for graph networks."""
  data = ConfigDict()
  data.name = "graphs"
  # A folder that launch.graph wrote; "" for 65,536 nodes in planted
  # communities.
  data.path = ""
  data.num_features = 16
  data.num_classes = 8
  # How many neighbours are sampled, level by level.
  data.fanouts = (10, 5)
  data.batch_size = 256
  # How many nodes every evaluation reads; 0 for all.
  data.validation_nodes = 4096
  # "compiled" (by numba, the extra graphs), "reference" (numpy), or "auto" for
  # the first where it is there. Both draw the same.
  data.sampler = "auto"
  # Threads of the compiled sampler; 0 for one per core.
  data.threads = 0
  # How devices get features: "cpu_gather" (through a buffer of the host),
  # "device" (they read the host's pinned memory), "sharded" (every device has
  # a share), or "auto" for the first two, whichever moves fewer bytes.
  data.access = "auto"
  # Rows that stay on every device, and which: those of the most edges
  # ("degree"), or those that sampled batches ask for most ("presampling").
  data.cache_rows = 0
  data.cache = "degree"
  # Batches that the host makes while the present step runs.
  data.ahead = 1
  return data

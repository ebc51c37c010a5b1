"""A message-passing step of jraph, with the edges of a graph on all devices."""

PACKAGES = ("jraph",)
NODES, EDGES, GRAPHS, WIDTH = 128, 512, 4, 24  # EDGES on one device
LOCAL = (
  "device_edges", "device_receivers", "device_senders", "device_n_edge",
  "device_graph_idx",
)


def sharded_edges():
  """A call of `jraph.experimental.sharded_graphnet.ShardedEdgesGraphNetwork`.

  Nodes are ``[NODES, WIDTH]`` on all devices, edges
  ``[devices, EDGES, WIDTH]``.
  """
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType
  from jax.sharding import PartitionSpec as P
  from jraph.experimental import sharded_graphnet as sharded

  count = jax.device_count()
  mesh = jax.make_mesh((count,), ("i",), axis_types=(AxisType.Auto,))

  def added(*parts):
    return sum(parts)

  network = sharded.ShardedEdgesGraphNetwork(
    update_edge_fn=added, update_node_fn=added, update_global_fn=added,
    num_shards=count,
  )

  def array(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)

  def step(graph):
    # As under pmap, device-local fields have a leading dim of devices.
    local = {f: getattr(graph, f)[0] for f in LOCAL}
    graph = network(graph._replace(**local))
    return graph.nodes, graph.globals

  fields = dict(
    nodes=array((NODES, WIDTH)), globals=array((GRAPHS, WIDTH)),
    receivers=array((count * EDGES,), jnp.int32),
    senders=array((count * EDGES,), jnp.int32),
    n_node=array((GRAPHS,), jnp.int32), n_edge=array((GRAPHS,), jnp.int32),
    device_edges=array((count, EDGES, WIDTH)),
    device_receivers=array((count, EDGES), jnp.int32),
    device_senders=array((count, EDGES), jnp.int32),
    device_n_edge=array((count, 2), jnp.int32),
    device_graph_idx=array((count, 2), jnp.int32),
  )
  graph = sharded.ShardedEdgesGraphsTuple(**fields)
  specs = graph._replace(**{f: P("i" if f in LOCAL else None) for f in fields})
  shaped = jax.shard_map(
    step, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
  )
  return jax.jit(shaped), (graph,)

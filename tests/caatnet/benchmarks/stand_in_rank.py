"""Tensor rank without a model, for the benchmark of nano-batches."""

from caatnet.benchmarks.elastic import ring_peer


class Rank(ring_peer.RingPeer):
  """Rank whose steps have given seconds; sums of a layer go over its links."""

  def build(self, model, decodes, context):
    assert set(self.links.members) == {"p0", "p1"}
    self.given = sorted(model.items()), decodes, context

  def step(self, what, cut):
    self.sum("ring", 1 << 10)
    index = ("products", "sums", "step").index(what)
    seconds = cut + 10.0 ** index + int(self.me[1:])
    return {
      "seconds": seconds, "attention": seconds / 2, "mlp": seconds / 4,
      "end": float(sum(self.given[1:])), "given": self.given,
    }

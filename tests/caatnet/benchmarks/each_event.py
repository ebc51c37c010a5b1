"""Swarms of tests, in which one event of each kind happens."""


class EachEvent:
  """Before `Churn` in the bases of a class: injects its events, then ends.

  Attributes:
    all_kinds: Kinds of events, in their order.
  """

  all_kinds: tuple[str, ...]

  def _happen(self, rng):
    happened = {kind for _, kind in self._events}
    self.kinds = [kind for kind in self.all_kinds if kind not in happened][:1]
    if self.kinds:
      super()._happen(rng)
    else:
      self._options.events = len(self._events)


# Keys of config.benchmark of a small swarm.
SMALL = {
  "workers": 3, "silence_s": 1.0, "parameters": 100, "pause_s": 0.02,
  "samples": 2, "events": 100, "gap_s": 0.1,
}

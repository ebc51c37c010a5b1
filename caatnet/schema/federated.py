"""``config.federated``: a federated run (``launch.federate``)."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  DECAY,
  FRACTION,
  NOT_NEGATIVE,
  POSITIVE,
  Range,
  field,
  section,
)

_CODECS = ("none", "int8", "int4", "e3m0", "sparse")


@section
class Federated:
  """Server and clients of a federated run.

  ``config.optimizer`` and ``config.data.batch_size`` apply to each client.
  """

  clients: int = field(4, "Number of clients, N.", COUNT)
  per_round: int = field(4, "Clients that are sampled in each round, K.", COUNT)
  rounds: int = field(10, "Number of rounds.", COUNT)
  local_steps: int = field(10, "Steps of a client in a round.", COUNT)
  sampling: str = field(
    "weighted", 'Sampling of clients: "weighted" (K draws with the '
    "probabilities of the weights, with replacement; the mean of the updates), "
    '"uniform" (K different ones; unbiased, but its coefficients do not sum to '
    '1, so that unequal clients may diverge) or "ratio" (K different ones; '
    "their weighted mean, biased towards small weights).",
    ("weighted", "uniform", "ratio"),
  )
  weights: str = field(
    "examples", 'Weights of clients: their numbers of "examples", or "equal".',
    ("examples", "equal"),
  )
  stragglers: str = field(
    "wait", 'Policy for clients that miss the deadline: "wait" (with the '
    'deadline hang_s), "drop" their updates, or merge them "late", with a '
    "weight by age.",
    ("wait", "drop", "late"),
  )
  compensation: float = field(
    0.0, 'Norm of the correction of a "late" update for the change of the '
    "model since its revision, relative to the update, as in DC-S3GD; 0 for "
    "none.",
    NOT_NEGATIVE,
  )
  deadline_s: float = field(
    60.0, 'Time limit of a round in seconds with stragglers="drop" or "late".',
    POSITIVE,
  )
  hang_s: float = field(
    3600.0, 'Time limit of a round in seconds with stragglers="wait", for '
    "clients that are connected and never send an update.", POSITIVE,
  )
  reconnect_s: float = field(
    10.0, "Seconds without a connection until a round does not wait for a "
    "client.", POSITIVE,
  )
  silence_s: float = field(
    10.0, "Seconds of silence until the server closes a connection.",
    Range(0.1, 86_400),
  )
  alone_s: float = field(
    300.0, "Seconds without a server until a client ends.", POSITIVE
  )
  downlinks_at_once: int = field(
    0, "Clients that receive models at once; 0: all. 1 or 2 end a round in a "
    "radio cell earlier. Clients that computed longest are the first.",
    COUNT_OR_NONE,
  )
  uplinks_at_once: int = field(
    0, "Clients that send updates at once, on the server's request; 0: all, "
    "without requests. 1 or 2 complete more updates by a deadline in a radio "
    "cell.", COUNT_OR_NONE,
  )
  patience: int = field(
    0, "Rounds without a lower validation loss until the run stops; 0: never.",
    COUNT_OR_NONE,
  )
  min_gain: float = field(
    0.0, "Smallest decrease of the loss that counts, in nats.", NOT_NEGATIVE
  )
  outlier_factor: float = field(
    10.0, "Largest norm of an update and largest validation loss, as multiples "
    "of the medians of a round with at least three; 0 allows any finite one.",
    NOT_NEGATIVE,
  )
  max_examples: int = field(
    10**9, "Largest number of training examples, and of validation examples, "
    "that a client may report.", COUNT,
  )
  optimizer: str = field(
    "fedavg", 'Optimizer of the server: "fedavg" (the mean of the updates), '
    '"fedavgm" (with momentum) or "fedadam".',
    ("fedavg", "fedavgm", "fedadam"),
  )
  learning_rate: float = field(
    1.0, "Learning rate of the server's optimizer.", POSITIVE
  )
  momentum: float = field(
    0.9, 'Momentum of "fedavgm", and beta_1 of "fedadam".', DECAY
  )
  beta_2: float = field(0.99, 'Decay of the second moment of "fedadam".', DECAY)
  eps: float = field(1e-3, 'Epsilon of "fedadam".', POSITIVE)
  proximal: float = field(
    0.0, "Weight of FedProx' term, which pulls clients to the received model; "
    "0 for none.", NOT_NEGATIVE,
  )
  uplink: str = field("none", "Codec of updates.", _CODECS)
  downlink: str = field(
    "none", "Codec of the differences between revisions; with \"none\" clients "
    "receive float32 models.", ("none", "int8", "int4", "e3m0"),
  )
  stochastic: bool = field(
    False, "Whether the uplink's block codec rounds at random, without bias."
  )
  top_k: int = field(
    64, 'Elements that uplink="sparse" sends of each 4,096; a multiple of 4.',
    COUNT,
  )
  split: str = field(
    "even", 'Examples of clients: "even", "dirichlet" (classes are unevenly '
    'distributed), "packages" (text: a package of Python\'s standard library '
    'each) or "own" (all of config.data, which differs between clients).',
    ("even", "dirichlet", "packages", "own"),
  )
  alpha: float = field(
    0.5, 'Concentration of split="dirichlet"; small values are uneven.',
    POSITIVE,
  )
  validate: bool = field(
    True, "Whether clients evaluate received models on their validation "
    "examples.",
  )
  test: bool = field(
    True, "Whether clients evaluate trained models on these examples."
  )
  numpy_client: str = field(
    "", "PATH.py:FUNCTION of a Flower app's client_fn, whose NumPyClient "
    "trains instead of a model of the config (docs/flower.md).",
  )
  links: tuple[str, ...] = field(
    (), 'Links between clients and the server: one name or JSON file for all '
    'clients, or one per client, as in ("5g-40mhz",), with the names of '
    "parallel/plans/hardware/client_links.py. launch.federate emulates them "
    "when all processes are on this machine. () for no emulation.",
  )
  cpu_quota: float = field(
    0.0, "CPUs of each client that launch.federate starts on this machine, by "
    "a control group, for root; 0 for no limit.", FRACTION,
  )

"""``config.federated``: a federated run (``launch.federate``)."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
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
    "weighted", 'Sampling of clients: "weighted" (K draws with replacement, '
    "with probabilities proportional to the weights; the step is the mean of "
    'the updates), "uniform" (K different clients; unbiased, but coefficients '
    "do not sum to 1 in each round, so runs with very unequal weights may "
    'diverge) or "ratio" (K different clients; the step is their weighted '
    "mean, biased towards clients with small weights).",
    ("weighted", "uniform", "ratio"),
  )
  weights: str = field(
    "examples", "Weight of a client: its number of training examples "
    '("examples"), or 1 ("equal").', ("examples", "equal"),
  )
  stragglers: str = field(
    "wait", 'Policy for clients that miss the deadline: "wait" for them for at '
    'most hang_s, "drop" their updates, or merge them "late", in a later round '
    "and with a weight that decreases with their age.",
    ("wait", "drop", "late"),
  )
  compensation: float = field(
    0.0, 'Delay compensation of "late" updates for the change of the model '
    "since they were computed, as in DC-S3GD: norm of the correction divided "
    "by the norm of the update; 0 for none.", NOT_NEGATIVE,
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
    10.0, "Seconds without a connection after which a round no longer waits "
    "for a client.", POSITIVE,
  )
  silence_s: float = field(
    10.0, "Seconds without data after which the server closes a connection.",
    Range(0.1, 86_400),
  )
  alone_s: float = field(
    300.0, "Seconds without a connection after which a client exits.", POSITIVE
  )
  downlinks_at_once: int = field(
    0, "Clients that receive models concurrently; 0: all. In a radio cell, a "
    "round ends earlier with 1 or 2. Clients that computed longest in their "
    "last round receive theirs first.", COUNT_OR_ZERO,
  )
  uplinks_at_once: int = field(
    0, "Clients that send updates concurrently, each on the server's request; "
    "0: all, without requests. In a radio cell, more updates arrive by a "
    "deadline with 1 or 2.", COUNT_OR_ZERO,
  )
  patience: int = field(
    0, "Rounds without a lower validation loss after which the run stops; 0: "
    "never.", COUNT_OR_ZERO,
  )
  min_gain: float = field(
    0.0, "Smallest decrease of the validation loss, in nats, that resets "
    "patience.", NOT_NEGATIVE,
  )
  outlier_factor: float = field(
    10.0, "Updates and validation losses are excluded if the norm or loss "
    "exceeds this multiple of the round's median (of at least three finite "
    "values); 0 excludes only those that are not finite.", NOT_NEGATIVE,
  )
  max_examples: int = field(
    10**9, "Largest number of training examples, and of validation examples, "
    "that a client may report.", COUNT,
  )
  optimizer: str = field(
    "fedavg", 'Optimizer of the server: "fedavg" (the mean of the updates), '
    '"fedavgm" (with momentum) or "fedadam".', ("fedavg", "fedavgm", "fedadam"),
  )
  learning_rate: float = field(
    1.0, "Learning rate of the server's optimizer.", POSITIVE
  )
  momentum: float = field(
    0.9, 'Momentum of "fedavgm", and beta_1 of "fedadam".', DECAY
  )
  beta_2: float = field(0.99, 'Decay of the second moment of "fedadam".', DECAY)
  eps: float = field(1e-3, 'Epsilon in the denominator of "fedadam".', POSITIVE)
  proximal: float = field(
    0.0, "Weight of FedProx' term, which pulls clients to the received model; "
    "0 for none.", NOT_NEGATIVE,
  )
  uplink: str = field("none", "Codec of the clients' updates.", _CODECS)
  downlink: str = field(
    "none", 'Codec of model differences that clients receive; with "none" they '
    "receive float32 models.", ("none", "int8", "int4", "e3m0"),
  )
  stochastic: bool = field(
    False, 'Whether uplink="int8", "int4" or "e3m0" rounds stochastically, '
    "without bias, instead of to nearest.",
  )
  top_k: int = field(
    64, 'Elements of each 4,096 that uplink="sparse" sends, those of largest '
    "magnitude; a multiple of 4.", COUNT,
  )
  split: str = field(
    "even", 'Assignment of examples to clients: "even", "dirichlet" (classes '
    'are unevenly distributed), "packages" (text: each client has a package of '
    'Python\'s standard library) or "own" (each client has all of its own '
    "config.data).", ("even", "dirichlet", "packages", "own"),
  )
  alpha: float = field(
    0.5, 'Concentration parameter of split="dirichlet"; the smaller it is, the '
    "more the classes of clients differ.", POSITIVE,
  )
  validate: bool = field(
    True, "Whether clients evaluate received models on their validation "
    "examples.",
  )
  test: bool = field(
    True, "Whether clients also evaluate the models that they have trained."
  )
  numpy_client: str = field(
    "", "PATH.py:FUNCTION, the client_fn of a Flower app, whose NumPyClient "
    'trains instead of a model of the config (docs/flower.md); "" for none.',
  )
  links: tuple[str, ...] = field(
    (), "Links between clients and the server: one name or JSON file for all "
    'clients, or one per client, as in ("5g-40mhz",). Names are those of '
    "parallel/plans/hardware/client_links.py. launch.federate emulates the "
    "links when all processes are on this machine. () for no emulation.",
  )
  cpu_quota: float = field(
    0.0, "CPU limit of each client that launch.federate starts on this "
    "machine, as a fraction of one CPU. A control group sets it, which needs "
    "root. 0 for no limit.", FRACTION,
  )

"""Config of the study of federated rounds over links."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  FRACTION,
  NOT_NEGATIVE,
  POSITIVE,
  POSITIVE_FRACTION,
  SEED,
  Range,
  field,
)
from caatnet.studies.keys import study_key

_MAX_S = 1e6  # at larger times float64 does not resolve a short transfer
_SECONDS = Range(0, _MAX_S)
# Ranges in which the solver's tolerances (HiGHS, 1e-7) are comparatively small.
_INTERVAL_RANGE, _LIMIT = Range(0, 1e3), Range(1e-3, 1)


@register.study
class FederatedLinks:
  """Predicted federated rounds over links, and figures of a 5G testbed."""

  name: str = field("federated_links", "Name of the config.")
  study: str = study_key("federated")
  links: tuple[str, ...] = field(
    ("ethernet", "wifi", "5g-20mhz", "5g-40mhz", "5g-100mhz", "5g-b210",
     "5g-fr2", "5g-public", "5g-bad"),
    "Names of links in parallel/plans/hardware/client_links.py, or files.",
  )
  clients: tuple[int, ...] = field(
    (4, 8, 16), "Numbers of clients, all of which are in each round.", COUNT
  )
  parameters: tuple[int, ...] = field(
    (100_000, 740_554, 11_181_642),
    "Numbers of float32 parameters: a small model, SqueezeNet 1.0 and "
    "ResNet-18 for 10 classes.", COUNT, empty=True,
  )
  training_s: float = field(
    10.0, "Time of a client's local steps, in seconds. The default is assumed; "
    "launch.federate measures it as t_tr.", Range(0, _MAX_S, above=True),
  )
  validation_s: float = field(
    0.5, "Seconds of the evaluation of the received model, t_v.", _SECONDS
  )
  test_s: float = field(
    0.5, "Seconds of the evaluation of the trained model, t_te.", _SECONDS
  )
  aggregation_s: float = field(
    0.05, "Seconds of decoding and merging on the server, t_a.", _SECONDS
  )
  compute_spread: float = field(
    0.05, "Relative standard deviation of compute times between clients.",
    FRACTION,
  )
  fixed_s: float = field(
    0.005, "Seconds of a message before its first byte is sent.", _SECONDS
  )
  seed: int = field(0, "Seed of the order of compute times, and of trials.",
                    SEED)
  published_parameters: int = field(
    740_554, "Parameters of the testbed's model: SqueezeNet for 10 classes.",
    COUNT,
  )
  published_clients: int = field(
    4, "Clients of the testbed, assumed: the number was not available.", COUNT
  )
  wifi: tuple[float, ...] = field(
    (50.0, 100.0, 200.0), "Plausible rates of the testbed's WiFi, in Mbit/s.",
    POSITIVE,
  )
  tolerance: float = field(
    0.1, "Largest accepted relative deviation from the published ratios.",
    FRACTION,
  )
  region_points: int = field(121, "Number of 5G rates to fit.", COUNT)
  trials: int = field(2000, "Number of random trials of stragglers.", COUNT)
  trial_rounds: int = field(10, "Rounds of a trial.", COUNT)
  consistent: float = field(
    0.8, "A client is a consistent straggler if it is the slowest in at least "
    "this fraction of a trial's rounds.", POSITIVE_FRACTION,
  )
  lasting: tuple[float, ...] = field(
    (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
    "Standard deviations of clients' mean times in a trial, divided by that of "
    "a client's times between rounds; ascending.", NOT_NEGATIVE,
  )
  cell: str = field(
    "5g-20mhz", "Link of the radio cell in which scheduled, coded and late "
    "updates are simulated.",
  )
  scheduled_clients: int = field(
    4, "Clients in the table of schedules.", Range(1, 6, whole=True)
  )
  apart: tuple[float, ...] = field(
    (0.0, 0.5, 1.5), "Intervals between the times at which clients' updates "
    "are ready, relative to the time of one uplink alone in the cell.",
    _INTERVAL_RANGE, empty=True,
  )
  limits: tuple[float, ...] = field(
    (1.0, 0.5, 0.25), "Maximum rates of every second client, as fractions of "
    "the cell's rate.", _LIMIT,
  )
  deadline: float = field(
    0.95, "Deadline, relative to the time of a round in which uplinks share "
    "the cell.", POSITIVE
  )
  at_once: tuple[tuple[int, int], ...] = field(
    ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (1, 1), (2, 2)),
    "Largest numbers of clients that receive and that send at the same time; 0 "
    "for all.", COUNT_OR_ZERO,
  )
  slow: float = field(
    1.5, "Compute time of one slow client, relative to its usual one, in the "
    "table of coded and late updates.", POSITIVE,
  )
  fragments: tuple[int, ...] = field(
    (1, 4, 16), "Numbers of streamed fragments.", COUNT, empty=True,
  )
  streamed_rounds: int = field(
    6, "Simulated rounds of streamed fragments.", Range(2, 1000, whole=True)
  )

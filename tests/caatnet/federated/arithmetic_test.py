"""Validation of updates by their norms."""

import pytest

from caatnet.federated import arithmetic, vector_codec


@pytest.mark.parametrize(("norms", "valid"), [
  ([1.0, 1e-9], [True, True]),  # the honest one is ten times the median
  ([1e30, 1.0], [True, True]),
  ([1e300, 1.0], [False, True]),
  ([1e300, 1.0, 1e-9], [False, True, True]),  # two of them are finite
  ([1.0, 1e-9, 2.0], [True, True, True]),
  ([1.0, 50.0, 2.0], [True, False, True]),
  ([], []),
])
def test_outliers_are_found_among_three_or_more(norms, valid):
  some = arithmetic.VectorArithmetic(
    arithmetic.optimizer("fedavg", 1.0, 0.9, 0.99, 1e-3),
    vector_codec.make("none"), outlier_factor=10.0,
  )
  assert some.healthy(norms) == valid

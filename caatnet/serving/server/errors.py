"""Errors as clients of OpenAI's interface expect them."""

from collections.abc import Mapping
from typing import Any

# Messages quote what clients have sent, which may be long.
_LONGEST = 500


class ApiError(Exception):
  """A request that is refused, or that fails.

  Attributes:
    status: The status code of HTTP.
    body: ``{"error": {"message", "type", "param", "code"}}``.
    headers: Headers of the answer.
  """

  def __init__(
    self, status: int, message: str, code: str | None = None,
    param: str | None = None, headers: Mapping[str, str] | None = None,
  ) -> None:
    """Makes an error.

    Args:
      status: The status code of HTTP.
      message: What is wrong, and what would be right.
      code: A word for it, by which programs know it.
      param: The field of the request that is wrong.
      headers: Headers of the answer.
    """
    if len(message) > _LONGEST:
      message = f"{message[:_LONGEST]}..."
    super().__init__(message)
    self.status = status
    self.headers = dict(headers or {})
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 401:
      kind = "authentication_error"
    elif status == 429:
      kind = "rate_limit_error"
    self.body: dict[str, Any] = {
      "error": {
        "message": message, "type": kind, "param": param, "code": code
      }
    }


def wrong(param: str, message: str, code: str | None = None) -> ApiError:
  """Returns the error of a field that is not as it should be."""
  return ApiError(400, message, code, param)

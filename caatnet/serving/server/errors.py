"""Errors in the format of OpenAI's API."""

from collections.abc import Mapping
from typing import Any

# Maximum length of a message: messages quote input from clients.
_MAX_MESSAGE_CHARS = 500


class ApiError(Exception):
  """A request that is refused or that fails.

  Attributes:
    status: HTTP status code.
    body: ``{"error": {"message", "type", "param", "code"}}``.
    headers: Headers of the response.
  """

  def __init__(
    self, status: int, message: str, code: str | None = None,
    param: str | None = None, headers: Mapping[str, str] | None = None,
  ) -> None:
    """Makes an error.

    Args:
      status: HTTP status code.
      message: The problem and the allowed values. Characters that cannot be
        printed are escaped, and longer messages are cut to 500 characters.
      code: Machine-readable identifier of the error.
      param: Invalid field of the request.
      headers: Headers of the response.
    """
    message = "".join(  # one line, although messages quote input
      c if c.isprintable() else repr(c)[1:-1] for c in message[
        : _MAX_MESSAGE_CHARS + 1
      ]
    )
    if len(message) > _MAX_MESSAGE_CHARS:
      message = f"{message[:_MAX_MESSAGE_CHARS]}..."
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


def invalid_field(
  param: str, message: str, code: str | None = None
) -> ApiError:
  """Returns the error (status 400) of an invalid field."""
  return ApiError(400, message, code, param)

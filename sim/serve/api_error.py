"""Answers that are no answers, in the form that OpenAI's clients know."""

from __future__ import annotations

import json

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that is answered with an error: HTTP `status`, a message, the parameter it is about.

    `retry_after_s`: after which time another try may help. `kind`: its type, "" for that of the status.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s
        self.kind = kind

    @property
    def headers(self) -> list[tuple[str, str]]:
        if self.status == 401:
            return [("www-authenticate", "Bearer")]
        return [] if self.retry_after_s is None else [("retry-after", str(self.retry_after_s))]

    def body(self) -> bytes:
        """The error as JSON."""
        kind = self.kind or _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()

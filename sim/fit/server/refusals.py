"""Why a server gave no answer, in words."""

from __future__ import annotations

import json
from dataclasses import dataclass

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from batchsim.base.errors import MeasuredError, cut

BROKEN = (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError, ValueError, EOFError)
"""What asking a server over HTTP may raise."""


@dataclass(frozen=True)
class Patience:
    """The longest, in seconds, that a connection may take to be made, a stream to be silent, and an answer to take."""

    connect_s: float = 10.0
    silent_s: float = 60.0
    answer_s: float = 900.0


class RequestError(Exception):
    """A request that was refused, cut or not what was asked for; `what` reads on after the load's name."""

    def __init__(self, what: str, status: int = 0) -> None:
        super().__init__(what)
        self.what, self.status = what, status


def reason(error: BaseException, patience: Patience) -> str:
    """Why there was no answer, in words."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"cannot be reached within {patience.connect_s:g} s"
    if isinstance(error, aiohttp.SocketTimeoutError):
        return f"it sent nothing for {patience.silent_s:g} s"
    if isinstance(error, TimeoutError):
        return f"its answer did not end within {patience.answer_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted ({cut(str(error.certificate_error))})"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"cannot be reached by TLS ({cut(str(error.os_error))}): does it speak http:// ?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot be reached ({cut(error.os_error.strerror or str(error.os_error))})"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it hung up without an answer"
    if isinstance(error, (aiohttp.ClientPayloadError, ConnectionResetError)):
        return "it broke off in the middle of an answer"
    return f"it does not speak HTTP ({cut(str(error)) or type(error).__name__})"


def words_of(text: str) -> str:
    """The message in an error's body, else its beginning."""
    try:
        message = json.loads(text)
        while isinstance(message, dict) and ("error" in message or "message" in message or "detail" in message):
            message = message.get("error") or message.get("message") or message.get("detail")
        text = message if isinstance(message, str) else text
    except ValueError:
        pass
    return cut(" ".join(text.split()) or "nothing", 160)


def refused(name: str, failed: RequestError) -> MeasuredError:
    """The error that ended load `name`, in one line with its remedy."""
    advice = {
        401: "Give the key with --api-key.",
        403: "Give the key with --api-key.",
        404: "Is the address right, and the model's name?",
        429: "It limits requests: lower --max-concurrency, or lift its limit.",
        503: "It is overloaded or not ready: lower --max-concurrency, or wait.",
    }.get(failed.status, "Look at its log.")
    return MeasuredError(f"{name}: {failed.what.rstrip('.')}. {advice}")

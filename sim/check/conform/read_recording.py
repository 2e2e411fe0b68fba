"""Reads the file of a recorded schedule, in batchsim's own form or in Vidur's, and that of a packer's result."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchsim.base.files import TEXT_BYTES, parse_json, read_bytes, reason_text
from batchsim.check.conform import vidur, vllm_v1
from batchsim.check.conform.fields import BadRecording
from batchsim.check.conform.recording import EXACT, Recording

GZIP = b"\x1f\x8b"


def recording_of(data: Any, policy: str | None, order: str | None = None) -> Recording:
    """The recording that the JSON value `data` is, for `policy` or the policy of the recorded scheduler; `order`, if
    given, replaces the recorded one. Raises BadRecording.
    """
    if isinstance(data, dict) and {"meta", "steps"} <= data.keys():
        recording = vllm_v1.recording(data, policy)
    elif isinstance(data, dict) and {"scheduler", "iterations"} <= data.keys():
        if order not in (None, EXACT):
            what = f"order {order} is not for Vidur's form, which lists what it knows in batch order"
            raise BadRecording(f"{what}. Drop it.")
        recording = vidur.recording(data, policy)
    else:
        what = "not a recording: needs meta, requests and steps"
        raise BadRecording(f"{what}. The form stands in batchsim.check.conform.")
    return recording if order is None else replace(recording, order=order)


def read_file(path: Path) -> Any:
    """The file's JSON value, which may be gzipped. BadRecording unless it is complete JSON without repeated keys."""
    try:
        data = read_bytes(path)
        if data.startswith(GZIP):
            data = _unpacked(data)
        return parse_json(data.decode("utf-8"))
    except OSError as error:
        raise BadRecording(f"cannot be read: {reason_text(error)}. Give a recording's path.") from None
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1:,} is not UTF-8 text"
        raise BadRecording(f"not a recording, or not all of one: {what}. Record it again.") from None
    except ValueError as error:
        raise BadRecording(f"not a recording, or not all of one: {error}. Record it again.") from None


def _unpacked(data: bytes) -> bytes:
    """The bytes that are gzipped in `data`, at most TEXT_BYTES. ValueError where they are not whole."""
    unpacking = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacking.decompress(data, TEXT_BYTES)
    except zlib.error as error:
        raise ValueError(f"damaged gzip data ({error})") from None
    if not unpacking.eof:
        raise ValueError(
            "gzip data that is cut off, or too large" if unpacking.unconsumed_tail else "gzip data cut off"
        )
    return unpacked

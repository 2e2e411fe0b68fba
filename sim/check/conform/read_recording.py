"""Reads the file of a recorded schedule, in batchsim's own form or in Vidur's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from batchsim.base.files import read_json, reason_text
from batchsim.check.conform import vidur, vllm_v1
from batchsim.check.conform.fields import BadRecording
from batchsim.check.conform.recording import EXACT, Recording


def read(path: Path, policy: str | None, order: str | None = None) -> Recording:
    """The recording in the file at `path`, for `policy` or the policy of the recorded scheduler; `order`, if given,
    replaces the recorded one. Raises BadRecording.
    """
    data = _json(path)
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


def _json(path: Path) -> Any:
    """The file's JSON value. BadRecording unless it is complete JSON without repeated keys."""
    try:
        return read_json(path)
    except OSError as error:
        raise BadRecording(f"cannot be read: {reason_text(error)}. Give a recording's path.") from None
    except ValueError as error:
        raise BadRecording(f"not a recording, or not all of one: {error}. Record it again.") from None

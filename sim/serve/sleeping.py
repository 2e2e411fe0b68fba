"""Sleep as vLLM has it: what is open is aborted or waited for, and what comes waits until the engines are woken.

As `sleep`, `wake_up` and `pause_scheduler` of vllm/v1/engine/core.py have it. Falling asleep and waking take no time
here: no weights are moved.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qs

from batchsim.base.errors import shown
from batchsim.serve.api_error import ApiError

_TAGS = {0: frozenset[str](), 1: frozenset({"weights", "kv_cache"}), 2: frozenset({"weights", "kv_cache"})}
_MOST_FIELDS = 16
_KNOWN = ("weights", "kv_cache", "scheduling")


class Sleep:
    """Whether the engines sleep, and the requests that wait for them.

    `level`: that of the sleep, or of the one that begins once all is answered; None: awake. `held` are requests that
    wait, as what sends them, by their ids, in the order of their coming.
    """

    def __init__(self) -> None:
        self.level: int | None = None
        self.held: dict[str, Callable[[], None]] = {}
        self._tags: frozenset[str] = frozenset()  # of memory that is gone
        self._callbacks: list[Callable[[], None]] = []  # of what waits for the sleep to begin

    def begin(self, level: int) -> None:
        self.level, self._tags = level, _TAGS[level]

    def when_begun(self, callback: Callable[[], None]) -> None:
        """Registers `callback` to be called by `settle`."""
        self._callbacks.append(callback)

    def settle(self) -> None:
        """Calls the callbacks that waited for all requests to be answered."""
        callbacks, self._callbacks = self._callbacks, []
        for each in callbacks:
            each()

    def wake(self, tags: list[str]) -> list[Callable[[], None]]:
        """Wakes what `tags` name, all without; returns what is to be sent then: nothing while some memory is gone.

        ApiError 400 for a tag that there is not.
        """
        for tag in tags:
            if tag not in _KNOWN:
                raise ApiError(400, f"tags has {shown(tag)}, known are {', '.join(_KNOWN)}", "tags")
        self._tags = self._tags - frozenset(tags) if tags else frozenset()
        if self._tags:
            return []
        held, self.held, self.level = list(self.held.values()), {}, None
        self.settle()
        return held


def asked_sleep(query: str) -> tuple[int, str]:
    """(level, mode) of /sleep. ApiError 400 for others than vLLM's, and for mode `keep`."""
    values = _values(query)
    level, mode = values.get("level", ["1"])[-1], values.get("mode", ["abort"])[-1]
    if level not in ("0", "1", "2"):
        raise ApiError(400, f"level must be 0, 1 or 2, not {shown(level)}", "level")
    if mode == "keep":
        raise ApiError(400, "mode keep is not served: a step cannot be halted. Write abort or wait.", "mode")
    if mode not in ("abort", "wait"):
        raise ApiError(400, f"mode must be abort or wait, not {shown(mode)}", "mode")
    return int(level), mode


def asked_tags(query: str) -> list[str]:
    """The tags of /wake_up; none: all."""
    return _values(query).get("tags", [])


def _values(query: str) -> dict[str, list[str]]:
    try:
        return parse_qs(query, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise ApiError(400, f"the query has more than {_MOST_FIELDS} fields") from None

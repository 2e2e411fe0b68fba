"""What an observer sees of the KV that passes between the engine of a replay and others."""

from __future__ import annotations

from typing import Any

from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.types import Sequence
from batchsim.policies.systems.vllm.vllm_connector import VllmConnector


class ObservedTransfers:
    """Watches the connector of `scheduler`. `connector` is that, `errors` the ids of the requests that a pull which
    failed has ended since the last step."""

    def __init__(self, scheduler: VllmConnector) -> None:
        self._scheduler = scheduler
        self.connector: KvConnector = scheduler.connector
        self.errors: list[int] = []
        self._kept: set[Sequence] = set()  # seen
        self._pulled: set[Sequence] = set()  # admitted by a pull, not running since

    @classmethod
    def of(cls, core: EngineCore) -> ObservedTransfers | None:
        """Watches the connector of the engine `core`, None if it has none."""
        scheduler = core.scheduler
        return cls(scheduler) if isinstance(scheduler, VllmConnector) else None

    def asked(self) -> dict[str, Any]:
        """Facts of the scheduler's latest call."""
        connector = self.connector
        self._pulled.update(seq for seq, _, _ in connector.pulling)
        return {
            "cached": [[seq.request.id, n] for seq, n in connector.hits],
            "loads_started": [[seq.request.id, tokens] for seq, tokens, _ in connector.pulling],
            "pulled_blocks": [[seq.request.id, blocks] for seq, _, blocks in connector.pulling],
            "remote": [seq.request.id for seq in self._scheduler.pulled],
        }

    def processed(self) -> dict[str, Any]:
        """Facts of the step processed latest."""
        noticed, kept = self.connector.noticed, self.connector.kept
        self._pulled.difference_update(noticed.failed)
        begun = [seq for seq in kept if seq not in self._kept]
        self._kept = set(kept)
        errors, self.errors = self.errors, []
        return {
            "loads_done": [seq.request.id for seq in noticed.loaded],
            "loads_failed": [seq.request.id for seq in noticed.failed],
            "sends_started": [[seq.request.id, kept[seq]] for seq in begun],
            "sends_done": [seq.request.id for seq in noticed.sent],
            "errors": errors,
        }

    def has_failed(self, request_id: int) -> bool:
        """Whether the pull of the request was just noticed to have failed."""
        return any(seq.request.id == request_id for seq in self.connector.noticed.failed)

    def takes_in(self, seq: Sequence) -> bool:
        """Whether `seq`, which runs from now on, was admitted by its pull."""
        if seq not in self._pulled:
            return False
        self._pulled.remove(seq)
        return True

"""The disk below the memory of a host, to which vLLM copies on what it offloads: how fast it is each way."""

from __future__ import annotations

from dataclasses import dataclass, fields

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.kernel.disk_copies import TieringConnector
from batchsim.kernel.host_link import OffloadLink
from batchsim.scenario.tier_config import TierConfig

_READ = ("kind", "bandwidth", "store_bandwidth", "latency")


@dataclass(frozen=True)
class DiskBelow:
    """A chunk, of all GPUs, takes `read_ns` and `write_ns`, a copy of chunks `fixed_ns` beside; `text` says how fast
    that is."""

    read_ns: int
    write_ns: int
    fixed_ns: int
    text: str

    @classmethod
    def of(cls, config: TierConfig, host: TierConfig, chunk_bytes: int) -> DiskBelow:
        """The disk that `config` states below `host`. ScenarioError where its bandwidth is missing, and for keys that
        are not a disk's."""
        defaults = TierConfig(kind="disk")
        for name in [f.name for f in fields(config) if f.name not in _READ]:
            if getattr(config, name) != getattr(defaults, name):
                why = "vLLM deletes nothing from it" if name == "size" else "it is a key of the host's tier"
                raise ScenarioError(f"{name} of a disk is not read: {why}. Leave it out.")
        if config.bandwidth is None:
            raise ScenarioError("bandwidth of the disk is missing. Write bandwidth: 5GB/s, say.")
        if host.store_threshold > 1:
            raise ScenarioError(
                f"store_threshold {host.store_threshold} is not simulated with a disk. Set it to 0, or leave out the"
                " disk."
            )
        read, write = config.bandwidth, config.store_bandwidth or config.bandwidth
        text = f"{read / 1e9:.4g} GB/s each way" if read == write else (
            f"reads at {read / 1e9:.4g}, writes at {write / 1e9:.4g} GB/s"
        )  # fmt: skip
        read_ns, write_ns = (round(chunk_bytes * NS_PER_S / each) for each in (read, write))
        return cls(read_ns, write_ns, config.latency, text)

    def __str__(self) -> str:
        return f" · disk below it, which gives nothing up ({self.text})"

    def connector(self, storing: OffloadLink, loading: OffloadLink) -> TieringConnector:
        """A connector for an engine that is about to be made, with these links between its GPUs and its host."""
        writing, reading = OffloadLink(self.fixed_ns, self.write_ns), OffloadLink(self.fixed_ns, self.read_ns)
        return TieringConnector(storing, loading, writing, reading)

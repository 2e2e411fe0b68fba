"""Clocks, power and temperature of the GPU while it is measured, and the energy of a step, as NVML reports them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_PERIOD_S = 0.2


class Telemetry:
    """Samples the GPU five times a second while entered as a context; without the pynvml module it records nothing.

    It reads only and never changes a setting of the card.
    """

    def __init__(self, device: str) -> None:
        self._rows: list[tuple[int, float, int, int]] = []  # SM clock in MHz, power in W, temperature in °C, throttling
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._card: Any = None
        if device == "cuda":
            self._open()

    def _open(self) -> None:
        try:
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
            self._card = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml
        except Exception:  # no module, no driver library, no permission: all mean that there is nothing to read
            self._nvml = None

    def __enter__(self) -> Telemetry:
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        nvml, card = self._nvml, self._card
        older = "nvmlDeviceGetCurrentClocksThrottleReasons"  # its name before pynvml 12
        newer = "nvmlDeviceGetCurrentClocksEventReasons"
        reasons = getattr(nvml, newer if hasattr(nvml, newer) else older)
        while not self._stop.wait(_PERIOD_S):
            try:
                row = (
                    nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetPowerUsage(card) / 1e3,
                    nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
                    reasons(card),
                )
            except nvml.NVMLError:
                return
            self._rows.append(row)

    def summary(self) -> dict[str, Any]:
        """What was sampled, as JSON values; empty where nothing could be read."""
        rows = self._rows[:]
        if not rows:
            return {}
        clocks, powers, temperatures, throttles = (sorted(column) for column in zip(*rows, strict=True))
        idle = getattr(self._nvml, "nvmlClocksThrottleReasonGpuIdle", 1)
        return {
            "samples": len(rows),
            "sm_clock_mhz": {"min": clocks[0], "median": clocks[len(rows) // 2], "max": clocks[-1]},
            "power_w": {"median": round(powers[len(rows) // 2], 1), "max": round(powers[-1], 1)},
            "temperature_c": {"max": temperatures[-1]},
            "throttled_share": round(sum(bool(reasons & ~idle) for reasons in throttles) / len(rows), 3),
        }

    def joules(self, work: Callable[[], int]) -> float | None:
        """Joules of one of the steps that `work` runs and counts; None where the card has no energy counter.

        The counter moves a few times a second, so `work` should last some seconds.
        """
        if self._nvml is None:
            return None
        try:
            before_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card)
            steps = work()
            after_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card)
        except self._nvml.NVMLError:
            return None
        return (after_mj - before_mj) / 1e3 / steps

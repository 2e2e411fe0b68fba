"""Which adapters requests ask for: by popularity, share and class."""

from __future__ import annotations

import numpy as np
import pytest

from batchsim.workload.adapter_draws import AdapterDraws
from batchsim.workload.loras import Loras
from batchsim.workload.popularity import SharePopularity, UniformPopularity, ZipfPopularity

EVENLY = (np.arange(100_000) + 0.5) / 100_000


@pytest.mark.parametrize(
    ("popularity", "expected"),
    [
        (None, [0.25] * 4),
        (UniformPopularity(), [0.25] * 4),
        (ZipfPopularity(1.0), [12 / 25, 6 / 25, 4 / 25, 3 / 25]),
        (SharePopularity((0.5, 0.3, 0.2, 0.0)), [0.5, 0.3, 0.2, 0.0]),
    ],
)
def test_adapters_are_asked_for_by_their_popularity(popularity: object, expected: list[float]) -> None:
    """Of the requests that ask for one; the others, 20 % of all, ask for the base model."""
    loras = Loras(4, popularity, share_of_requests=0.8)  # pyright: ignore[reportArgumentType]
    counts = np.bincount(loras.drawn(EVENLY) + 1, minlength=5) / len(EVENLY)
    assert counts == pytest.approx([0.2, *(0.8 * share for share in expected)], abs=1e-4)


def test_no_request_asks_where_the_share_is_none() -> None:
    """And all where it is not stated."""
    assert (Loras(3, share_of_requests=0.0).drawn(EVENLY) == -1).all()
    assert (Loras(3).drawn(EVENLY) >= 0).all()


def test_a_class_has_adapters_of_its_own() -> None:
    """Numbered behind those of the classes before it; classes without any share those of the workload."""
    common, own = Loras(2), Loras(3, share_of_requests=0.5)
    draws = AdapterDraws([("", common), ("chat", own), ("", common)], None)
    assert draws.names == ("lora-1", "lora-2", "chat-1", "chat-2", "chat-3")
    request_class = np.arange(3000) % 3
    adapter = draws.drawn(request_class, lambda purpose: np.random.default_rng(len(purpose)))["adapter"]
    assert set(adapter[request_class != 1]) == {0, 1}
    assert set(adapter[request_class == 1]) == {-1, 2, 3, 4}
    assert AdapterDraws([("", None)], None).drawn(request_class, lambda purpose: np.random.default_rng(0)) == {}
    assert AdapterDraws([("", Loras())], ("a", "b")).names == ("a", "b")

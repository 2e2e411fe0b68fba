"""A wrapper that draws the load of every episode, so that an agent learns for more than one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]
from gymnasium.utils import seeding  # pyright: ignore[reportMissingImports]


class RandomLoad(gymnasium.Wrapper):
    """`env` with a load out of `loads` in each episode, drawn from the generator of `env`; one given to `reset` wins.

    ValueError without loads. Judge an agent on seeds, and on loads between these, that it has not been trained on.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], loads: Sequence[float], option: str = "load") -> None:
        super().__init__(env)
        if not loads or min(loads) <= 0:
            raise ValueError(f"loads {list(loads)}: there must be some, all above 0.")
        self.loads, self.option = tuple(loads), option

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """An episode of `env` at a drawn load."""
        generator = self.env.unwrapped.np_random
        if seed is not None:
            generator, _ = seeding.np_random(seed)
        drawn = self.loads[int(generator.integers(len(self.loads)))]
        return self.env.reset(seed=seed, options=options or {self.option: drawn})

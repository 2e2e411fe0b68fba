"""Fewer rows of a table for a picture: true rows, with the extremes of every column in every stretch among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def downsampled_rows(columns: Sequence[NDArray[Any]], most: int) -> NDArray[np.int64]:
    """Indices, rising, of at most `most` rows of columns of equal length; all of them where there are no more.

    The rows are cut into stretches of nearly equal count, and of each the rows of the lowest and the highest value of
    every column are kept (the first of equals), with the very first and last. NaN counts as no value. ValueError where
    `most` has no room for one stretch.
    """
    count, each = len(columns[0]), 2 * len(columns)
    if count <= most:
        return np.arange(count)
    stretches = (most - 2) // each
    if stretches < 1:
        raise ValueError(f"most is {most}, and {len(columns)} columns need {each + 2} rows")
    edges = np.linspace(0, count, stretches + 1).astype(np.int64)
    kept = [0, count - 1]
    for values in columns:
        known = np.asarray(values, np.float64)
        low, high = np.where(np.isnan(known), np.inf, known), np.where(np.isnan(known), -np.inf, known)
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            kept += [start + int(low[start:end].argmin()), start + int(high[start:end].argmax())]
    return np.unique(kept)

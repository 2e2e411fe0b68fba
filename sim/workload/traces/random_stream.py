"""Common random numbers: a stream for each purpose, whatever the policy, the load and the order of events."""

from __future__ import annotations

from hashlib import blake2b

from batchsim.base.later import np


def random_stream(seed: int, purpose: str, *, user: int = 0, block: int = 0) -> np.random.Generator:
    """A generator that depends on its arguments alone; any two differing arguments give independent streams.

    The Philox key is a stable hash of (seed, purpose); user and block select a far part of its 256-bit counter.
    """
    digest = blake2b(f"{seed}|{purpose}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, block, user]))

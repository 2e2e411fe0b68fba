"""KV memory: how blocks are counted, given to sequences, and shared where a prefix cache finds them again."""

from batchsim.kernel.kv_blocks import CountingKV, KVBlockManager, TableKV

__all__ = ["CountingKV", "KVBlockManager", "TableKV"]

"""Training data: a sharded, shuffled, prefetching loader. Its position survives a change of world size."""

from zero_ext.data.loader import ShardedLoader

__all__ = ["ShardedLoader"]

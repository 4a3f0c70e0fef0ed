"""Ranks that share the packages of these tests: a Trainer takes all ranks of the default group."""

from tests.integrations.rank_pools import pool_fixture
from tests.multi.pool import RankPool, preload

preload("trl", "tests.integrations.trl.data")
rank_pool = pool_fixture(lambda: RankPool(2))

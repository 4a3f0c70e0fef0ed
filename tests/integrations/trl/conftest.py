"""Ranks that share the packages of these tests: a Trainer takes all ranks of the default group."""

from tests.integrations.rank_pools import pool_fixture
from tests.multi.pool import RankPool

rank_pool = pool_fixture(lambda: RankPool(2, preload=("trl", "tests.integrations.trl.data")))

"""A pool of ranks that share the packages of these tests."""

from tests.integrations.rank_pools import pool_fixture
from tests.multi.pool import RankPool, preload

preload("peft", "tests.integrations.peft.models")
rank_pool = pool_fixture(lambda: RankPool(2))

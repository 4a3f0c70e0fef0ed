"""A pool of ranks that share the packages of these tests."""

from tests.integrations.rank_pools import pool_fixture
from tests.multi.pool import RankPool

rank_pool = pool_fixture(lambda: RankPool(2, preload=("peft", "tests.integrations.peft.models")))

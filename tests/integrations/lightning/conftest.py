"""Worlds of exactly the wanted size: Lightning takes all ranks of the default group."""

from tests.integrations.rank_pools import pool_fixture
from tests.multi.worlds import Worlds

rank_pool = pool_fixture(Worlds)

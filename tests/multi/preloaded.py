"""The last module that the server of ranks imports: collections in them leave out all that it has."""

from tests.multi.garbage import collect_garbage

collect_garbage()

"""Live records in the order of their calls, at the same cost however many there are."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class NumberedItem(Protocol):
    """An item of the list, ordered by its number, from 1 on."""

    number: int


Item = TypeVar("Item", bound=NumberedItem)


class OrderedWeakList(Generic[Item]):
    """Items that others own, each added with a greater number than the one before it.

    A dead item is removed at the next call. The thread that drops it, maybe inside a finalizer, only notes
    its number.
    """

    def __init__(self) -> None:
        self._items: dict[int, weakref.ref[Item]] = {}
        # A ring of the numbers; 0 stands between the last one and the first one.
        self._before, self._after = {0: 0}, {0: 0}
        self._gone: deque[int] = deque()

    def __len__(self) -> int:
        self._forget()
        return len(self._items)

    def add(self, item: Item) -> None:
        """Put ``item`` at the end."""
        self._forget()
        number = item.number
        self._items[number] = weakref.ref(item)
        self._link(self._before[0], number)
        self._link(number, 0)
        weakref.finalize(item, self._gone.append, number).atexit = False

    def before(self, item: Item) -> Iterator[Item]:
        """Yield the items before ``item``, the nearest one first."""
        self._forget()
        number = self._before[item.number]
        while number:
            found = self._items[number]()
            if found is not None:
                yield found
            number = self._before[number]

    def _link(self, number: int, after: int) -> None:
        self._after[number], self._before[after] = after, number

    def _forget(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            del self._items[number]
            self._link(self._before.pop(number), self._after.pop(number))

"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Gives the free pages of the C library's heap back, where it can (glibc).

    After a few large tensors were freed, glibc puts tensors of up to 32 MiB on its heap, which it gives back
    only from the end: of a model that is built and freed parameter by parameter most would stay.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)

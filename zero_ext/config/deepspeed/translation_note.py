"""A note of a translation about a key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A note that is reported once about a translated configuration.

    Attributes:
        path: DeepSpeed's key path.
        outcome: "no effect" for a key that changes nothing here, "default" for a default that DeepSpeed
            would take.
        why: the reason.
    """

    path: str
    outcome: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.outcome}: {self.why}"

"""Optional packages: used where they are, and asked for by their install line where they are not."""

from __future__ import annotations

import importlib.util


def require(package: str, purpose: str) -> None:
    """Raise ``ModuleNotFoundError`` with the install line unless ``package`` can be imported."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{purpose}: expected the package '{package}', which is not installed. Install it with "
            f"pip install {package}, or leave it out of the monitor section of the configuration.",
            name=package,
        )

"""What `ssd doctor` looks at, one module per subject."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One finding. ``fail`` means that something essential does not work."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as JSON."""
        return asdict(self)

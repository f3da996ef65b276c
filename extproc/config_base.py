"""What all sections of the configuration are made of: their base, and the types of their values."""

from typing import Annotated

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Address = Annotated[str, Meta(pattern=r"^(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}\Z")]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: frozen, and unknown keys are refused."""

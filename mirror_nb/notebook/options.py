"""What `%%mirrored` and `%mirror start` were asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mirror_nb.collectives.base import BYTES_PER_PACK
from mirror_nb.collectives.options import CommunicationOptions
from mirror_nb.errors import UsageError


@dataclass(frozen=True, slots=True)
class CellOptions:
    """The options of `%%mirrored`."""

    replicas: tuple[int, ...] | None = None
    # None: all.
    synchronize: bool = True
    out: str | None = None
    # A name for the result, instead of showing it.
    quiet: bool = False
    timeout: float | None = None
    # Seconds.
    dashboard: bool = False
    # Above what it shows.


@dataclass(frozen=True, slots=True)
class GradientFlags:
    """How replicas exchange gradients, in the words of `%mirror start`; None: not said."""

    ops: str | None = None
    # The name of the cross-device ops.
    bucket_mb: float | None = None
    # Size of a bucket, MiB.
    compression: str | None = None
    # "bf16", or "none".

    def options(self) -> CommunicationOptions:
        """Return the same as options. Raises UsageError for what cannot be."""
        if self.bucket_mb is not None and not 0 < self.bucket_mb < math.inf:
            usual = BYTES_PER_PACK / 2**20
            raise UsageError(f"--bucket-mb is {self.bucket_mb:g}; it must be above 0, and {usual:g} is usual")
        return CommunicationOptions(
            # At least one byte: none stands for the usual size.
            bytes_per_pack=math.ceil((self.bucket_mb or 0) * 2**20),
            compression=None if self.compression == "none" else self.compression,
        )

    def over(self, before: GradientFlags) -> GradientFlags:
        """Return this where it says something, else what was before."""
        return GradientFlags(
            self.ops or before.ops,
            before.bucket_mb if self.bucket_mb is None else self.bucket_mb,
            self.compression or before.compression,
        )

    def flags(self) -> list[str]:
        """Return the flags that say it."""
        size = None if self.bucket_mb is None else f"{self.bucket_mb:g}"
        given = {"--ops": self.ops, "--bucket-mb": size, "--compression": self.compression}
        return [f"{flag} {value}" for flag, value in given.items() if value is not None]


AS_USUAL = GradientFlags()
# Nothing was said.

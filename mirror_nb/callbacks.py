"""Keras's callbacks, by the name under which they are looked for: `from mirror_nb.callbacks import EarlyStopping`.

Knows nothing but where they are made.
"""

from __future__ import annotations

from mirror_nb.training.callbacks import *  # noqa: F403
from mirror_nb.training.callbacks import __all__ as __all__

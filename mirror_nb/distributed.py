"""What was distributed, and an epoch of it, as they are told from other values. Knows what they are made of alone."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


class Distributed:
    """What was made of a source to be gone through. Attributes that it lacks are those of its DataLoader.

    So `len(dataset.dataset)`, `dataset.batch_size` (that of a global batch) and `dataset.sampler` are the loader's.
    Raises AttributeError, which says what to do, where the source is no DataLoader.
    """

    source: Any

    def follow(self, source: Any) -> None:
        """Be made of this, in the same way: the notebook has changed what it was made of."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name == "source" or name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if isinstance(self.source, DataLoader):
            return getattr(self.source, name)
        raise AttributeError(
            f"no `{name}`: this dataset was made of a {type(self.source).__name__}, and only one that was made of a "
            f"DataLoader has a DataLoader's attributes. Ask what it was made of, its `source`, or distribute "
            f"DataLoader(TensorDataset(...), batch_size=...)"
        )


class Underway:
    """An epoch of such a thing that has begun: it goes on where it is, and is named from elsewhere."""

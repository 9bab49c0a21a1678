"""A training's file: one dict of tensors and plain values, written whole or not at all, read without unpickling code.

Knows how it gets onto the disk and back. Knows nothing of what is in it but that it is mirror_nb's and of which
version.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from mirror_nb.errors import CheckpointError, MirrorError, UsageError

FORMAT = "mirror_nb"
VERSION = 1


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Put `content` into a file, in the place of the one that is there, as a whole or not at all.

    It is written beside its place, made permanent, and moved there: who reads meanwhile, or after a crash, finds
    the old file or the new one. A link stays one, and the file that it points to is replaced.

    Raises UsageError for what `read` could not give back, CheckpointError where the disk refuses.
    """
    place = os.path.realpath(path)
    content = plain({**content, "format": FORMAT, "version": VERSION})
    beside = os.path.join(os.path.dirname(place), f".{os.path.basename(place)}.{secrets.token_hex(4)}.part")
    try:
        _write(beside, content)
        os.replace(beside, place)
        _settle_folder(os.path.dirname(place))
    except OSError as reason:
        there = "the file that was there is as it was" if os.path.isfile(place) else "nothing was left there"
        raise CheckpointError(f"cannot write {os.fspath(path)!r}: {_told(reason)}; {there}") from reason
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `write` put into a file, tensors on the CPU.

    Nothing but tensors and plain values is ever made of it. Raises CheckpointError for a file that is not there, not
    whole, not mirror_nb's, of a newer version, or that holds anything else.
    """
    name = os.fspath(path)
    try:
        file = open(path, "rb")  # noqa: SIM115, what fails here is not what fails below
    except OSError as reason:
        raise CheckpointError(f"cannot read {name!r}: {_told(reason)}") from reason
    with file:
        content = _loaded(file, name)
    return _checked(content, name)


def _loaded(file: IO[bytes], name: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as reason:
        raise CheckpointError(
            f"{name!r} was not loaded: it is no file of mirror_nb, or was tampered with; it holds more than tensors "
            "and plain values, and nothing of it was run"
        ) from reason
    except Exception as reason:
        # torch has an exception of its own for every place at which a file may break off.
        raise CheckpointError(
            f"{name!r} is no file that Model.save wrote, or a part of one ({type(reason).__name__}); take another "
            "checkpoint"
        ) from reason


def _checked(content: Any, name: str) -> dict[str, Any]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{name!r} was not written by Model.save; a state dict of torch.save is loaded with "
            "network.load_state_dict(torch.load(path, weights_only=True))"
        )
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{name!r} has version {version!r} of the format, and this mirror_nb reads up to {VERSION}; update "
            "mirror_nb"
        )
    return content


def is_all_of_one(content: Any) -> bool:
    """Whether this is what torch.load gives of a file that `write` wrote, where its state dict is asked for."""
    if not isinstance(content, Mapping) or "state_dict" not in content:
        return False
    written = content.get("format")
    return isinstance(written, str) and written == FORMAT


@contextlib.contextmanager
def taking_apart(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what fails inside, since parts of a file are not what was written there, into a CheckpointError."""
    try:
        yield
    except MirrorError:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as reason:
        raise CheckpointError(
            f"{os.fspath(path)!r} is damaged ({type(reason).__name__}: {reason}); take another checkpoint"
        ) from reason


def plain(content: Any) -> Any:
    """The same in tensors and plain values alone, each tensor with no more bytes than its own.

    Tensors that share memory share it afterwards if they are the same; NumPy's numbers become Python's, parameters
    tensors, all kinds of dict become dict. Raises UsageError, which names the place, for anything else.
    """
    return _plain(content, (), {})


def _plain(value: Any, where: tuple[Any, ...], copies: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(value, Tensor):
        if is_lazy(value):
            raise UsageError(
                f"cannot save {_told_place(where)}: a lazy layer does not know its shape yet; call the network once "
                "before it is saved"
            )
        return _own(value.detach(), where, copies)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), where, copies)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in _PLAIN:
                raise _not_plain(key, (*where, key))
        items = {key: _plain(item, (*where, key), copies) for key, item in value.items()}
        if not hasattr(value, "_metadata"):
            return items
        # A state dict: modules see in it which version of theirs wrote it.
        state = OrderedDict(items)
        state._metadata = _plain(value._metadata, (*where, "_metadata"), copies)  # type: ignore[attr-defined]
        return state
    if isinstance(value, (list, tuple)):
        members = [_plain(item, (*where, i), copies) for i, item in enumerate(value)]
        return members if isinstance(value, list) else tuple(members)
    raise _not_plain(value, where)


_PLAIN = (str, int, float, bool, type(None))
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _own(tensor: Tensor, where: tuple[Any, ...], copies: dict[tuple[Any, ...], Tensor]) -> Tensor:
    sparse = tensor.layout in _SPARSE
    dense = tensor.layout is torch.strided and not tensor.is_nested
    if type(tensor) is not Tensor or tensor.is_meta or not (sparse or dense):
        raise _not_plain(tensor, where)
    if sparse:
        return tensor.cpu().clone()
    # A conjugate is the same memory, read otherwise.
    read = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), read)
    if tensor.numel() and place in copies:
        return copies[place]
    own = tensor.cpu().resolve_conj().resolve_neg()
    if own.untyped_storage().nbytes() != own.numel() * own.itemsize:
        # A view would take all of the memory that it looks at into the file.
        own = own.clone()
    return copies.setdefault(place, own)


def _not_plain(value: Any, where: tuple[Any, ...]) -> UsageError:
    return UsageError(
        f"cannot save {_told_place(where)}: a {type(value).__qualname__} is no tensor and no plain "
        "value (number, string, list, tuple, dict), and would make a file that runs code when it is read"
    )


def _told_place(where: tuple[Any, ...]) -> str:
    return ".".join(map(str, where)) or "it"


# ---- onto the disk ------------------------------------------------------------------------------------


def _write(path: str, content: Any) -> None:
    # With the rights that any new file gets here, and only if there is none of this name.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    with open(descriptor, "wb") as file:
        watched = _Watched(file)
        torch.save(content, cast(IO[bytes], watched))
        watched.check()
        file.flush()
        os.fsync(file.fileno())


@final
class _Watched:
    """A file that keeps what its writing raised: torch's writer would turn a full disk into an error of its own."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.failed: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.failed is None:
            try:
                self._file.write(data)
            except BaseException as error:
                self.failed = error
        # As if all were well: the writer ends sooner or later, and then it is told.
        return len(data)

    def flush(self) -> None:
        """What is left is flushed at the end."""

    def check(self) -> None:
        if self.failed is not None:
            raise self.failed


def _settle_folder(folder: str) -> None:
    """Make the new name permanent, where folders can be told to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _told(reason: OSError) -> str:
    return reason.strerror or str(reason)

"""Downloads in replicas: one fetches, the others use what it brought."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import doing, eventually, press_ctrl_c, run_cell

from mirror_nb.replica import downloads

CONTENT = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What a replica changes of torch and Python is as before at the end."""
    retrieve, fetch, patience = urllib.request.urlretrieve, torch.hub.download_url_to_file, downloads._patience
    clone = torch.hub._get_cache_or_reload  # type: ignore[attr-defined]
    yield
    urllib.request.urlretrieve, torch.hub.download_url_to_file, downloads._patience = retrieve, fetch, patience
    torch.hub._get_cache_or_reload = clone  # type: ignore[attr-defined]


def waiting(folder: Path) -> bool:
    """Whether somebody waits for the folder's lock."""
    inode = f":{folder.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process has the folder's lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def while_another(folder: Path, does: Callable[[], None], call: Callable[[], Any]) -> Any:
    """Call, wait until that waits for the other, and let the other do its part; return or raise what the call does."""
    ended: dict[str, Any] = {}

    def work() -> None:
        try:
            ended["value"] = call()
        except Exception as error:
            ended["error"] = error

    thread = threading.Thread(target=work)
    with held(folder):
        thread.start()
        eventually(lambda: waiting(folder), "a wait for the lock")
        does()
    thread.join(20)
    assert not thread.is_alive()
    if "error" in ended:
        raise ended["error"]
    return ended["value"]


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is no replica that comes first."""
    monkeypatch.setattr(downloads, "_patience", downloads.PATIENCE_SECONDS)


def retrieving(calls: list[str]) -> Callable[..., Any]:
    def urlretrieve(url: str, filename: Any = None, *args: Any) -> Any:
        calls.append(url)
        Path(filename or "nowhere").write_bytes(CONTENT)
        return filename, {"Length": 1}

    return downloads._retrieving_once(urlretrieve)


def test_who_is_alone_downloads(tmp_path):
    calls: list[str] = []
    target = tmp_path / "data.bin"
    assert retrieving(calls)("u", target) == (target, {"Length": 1})
    assert retrieving(calls)("u", str(target))[0] == str(target)
    assert calls == ["u", "u"]
    assert target.read_bytes() == CONTENT
    assert os.listdir(tmp_path) == ["data.bin"]


def test_who_waited_uses_what_came(tmp_path):
    calls: list[str] = []
    target = tmp_path / "data.bin"
    target.write_bytes(b"old")
    name, headers = while_another(
        tmp_path, lambda: target.write_bytes(b"brought") and None, lambda: retrieving(calls)("u", target)
    )
    assert (name, list(headers)) == (target, [])
    assert calls == []
    assert target.read_bytes() == b"brought"


def test_who_waited_for_something_else_downloads(tmp_path):
    calls: list[str] = []
    (tmp_path / "data.bin").write_bytes(b"old")
    other = tmp_path / "other.bin"
    while_another(
        tmp_path, lambda: other.write_bytes(b"x") and None, lambda: retrieving(calls)("u", tmp_path / "data.bin")
    )
    assert calls == ["u"]
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_what_fails_leaves_no_half_file_and_no_lock(tmp_path):
    def breaks(url: str, filename: Any) -> Any:
        Path(filename).write_bytes(b"half")
        raise urllib.error.URLError("gone")

    once = downloads._retrieving_once(breaks)
    for _ in range(2):
        with pytest.raises(urllib.error.URLError):
            once("u", tmp_path / "x")
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        retrieving([])("u", tmp_path / "no" / "x")


def test_without_a_name_nothing_is_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []
    assert retrieving(calls)("u") == (None, {"Length": 1})
    assert calls == ["u"]


def test_pretrained_weights_come_once(tmp_path):
    calls = []

    def fetch(url: str, dst: str, hash_prefix: str | None = None, progress: bool = True) -> None:
        calls.append(dst)

    target = tmp_path / "resnet.pth"
    once = downloads._fetching_once(fetch)
    while_another(tmp_path, lambda: target.write_bytes(b"w") and None, lambda: once("u", str(target), progress=False))
    assert calls == []
    once("u", str(target), progress=False)
    assert calls == [str(target)]


def test_repositories_are_cloned_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    cloned = downloads._cloning_once(lambda repo, again=False: sorted(os.listdir(tmp_path)))
    found = while_another(tmp_path, lambda: (tmp_path / "pytorch_vision").mkdir(), lambda: cloned("a/b", again=True))
    assert found == ["pytorch_vision"]


def test_torch_still_has_what_is_replaced():
    assert callable(torch.hub._get_cache_or_reload)  # type: ignore[attr-defined]
    downloads.take_turns(0)
    assert urllib.request.urlretrieve.__wrapped__.__module__ == "urllib.request"  # type: ignore[attr-defined]
    assert torch.hub.download_url_to_file.__wrapped__.__module__ == "torch.hub"  # type: ignore[attr-defined]
    assert torch.hub._get_cache_or_reload.__wrapped__.__module__ == "torch.hub"  # type: ignore[attr-defined]


def test_a_torch_without_it_is_left_alone(monkeypatch):
    monkeypatch.delattr(torch.hub, "_get_cache_or_reload")
    downloads.take_turns(1)
    assert not hasattr(torch.hub, "_get_cache_or_reload")
    # For the fixture, which puts it back.
    torch.hub._get_cache_or_reload = None  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- datasets that download themselves

TORCHVISION = '''
import os

class VisionDataset:
    def __init__(self, root):
        self.root = root

class Digits(VisionDataset):
    asked = []

    def __init__(self, root, train=True, download=False):
        super().__init__(root)
        self.asked.append(download)
        if download:
            self.download()
        if not os.path.exists(self._file):
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.data = open(self._file).read()

    @property
    def _file(self):
        return os.path.join(self.root, "digits")

    def download(self):
        import urllib.request
        urllib.request.urlretrieve("file:" + os.environ["DIGITS"], self._file)

class More(Digits):
    """Its `__init__` has the root and more for another's."""

    def __init__(self, root, kind, **kwargs):
        self.kind = kind
        super().__init__(root, **kwargs)

class Folder(VisionDataset):
    """It cannot download."""

    def __init__(self, root):
        super().__init__(root)
'''


@pytest.fixture
def vision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module like torchvision.datasets, whose data come from a file."""
    module: Any = types.ModuleType("torchvision.datasets")
    exec(TORCHVISION, vars(module))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)
    source = tmp_path / "source"
    source.write_text("0123456789")
    monkeypatch.setenv("DIGITS", str(source))
    (tmp_path / "data").mkdir()
    downloads.take_turns_in_torchvision()
    return module


def test_a_dataset_that_is_there_is_read_by_all_who_waited(vision, second, tmp_path):
    root = tmp_path / "data"

    def bring() -> None:
        (root / "digits").write_text("brought")

    made = while_another(root, bring, lambda: vision.Digits(root, download=True))
    assert (made.data, vision.Digits.asked) == ("brought", [False])
    made = while_another(root, bring, lambda: vision.More(str(root), "k", train=False, download=True))
    assert (made.data, made.kind, vision.Digits.asked) == ("brought", "k", [False, False])


def test_what_another_did_not_bring_is_downloaded(vision, second, tmp_path):
    made = while_another(tmp_path / "data", lambda: None, lambda: vision.Digits(str(tmp_path / "data"), True, True))
    assert (made.data, vision.Digits.asked) == ("0123456789", [False, False, True])


def test_why_a_dataset_does_not_come_each_says_itself(vision, second, tmp_path):
    os.environ["DIGITS"] = str(tmp_path / "nothing")
    with pytest.raises(urllib.error.URLError):
        while_another(tmp_path / "data", lambda: None, lambda: vision.Digits(tmp_path / "data", download=True))
    assert not downloads._held


def test_who_comes_second_waits_for_the_first_to_come(vision, second, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "_patience", 20.0)
    looked = threading.Event()
    fetched: list[Any] = []
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: looked.set() or threading.Event().wait(seconds))
    thread = threading.Thread(target=lambda: fetched.append(vision.Digits(tmp_path / "data", download=True)))
    thread.start()
    assert looked.wait(20)
    with held(tmp_path / "data"):
        eventually(lambda: waiting(tmp_path / "data"), "a wait for the lock")
        (tmp_path / "data" / "digits").write_text("brought")
    thread.join(20)
    assert (fetched[0].data, vision.Digits.asked) == ("brought", [False, False])


def test_the_first_downloads_at_once(vision, tmp_path, monkeypatch):
    monkeypatch.delattr(downloads.time, "sleep")
    made = vision.Digits(tmp_path / "data", download=True)
    assert (made.data, vision.Digits.asked) == ("0123456789", [True])


def test_without_download_nobody_waits(vision, tmp_path):
    with held(tmp_path / "data"):
        with pytest.raises(RuntimeError, match="Dataset not found"):
            vision.Digits(tmp_path / "data")
        assert vision.Folder(tmp_path / "data").root == tmp_path / "data"
        with pytest.raises(TypeError, match="colour"):
            vision.Digits(tmp_path / "data", colour=3, download=True)


def test_a_folder_that_is_not_there_is_made_and_its_errors_are_the_datasets(vision, tmp_path):
    assert vision.Digits(tmp_path / "new" / "deep", download=True).data == "0123456789"
    with pytest.raises((urllib.error.URLError, NotADirectoryError)):
        vision.Digits(tmp_path / "source" / "x", download=True)


# ---------------------------------------------------------------------- in replicas


@contextmanager
def served(folder: Path, until: Callable[[], Any] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server, and what was asked of it; it answers once another replica waits its turn."""
    asked: list[str] = []
    until = until or (lambda: eventually(lambda: waiting(folder) or len(asked) > 1, "the other replica"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            until()
            with suppress(OSError):
                self.send_response(200)
                self.send_header("Content-Length", str(len(CONTENT)))
                self.end_headers()
                self.wfile.write(CONTENT)

        def log_message(self, *args: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "call", ["urllib.request.urlretrieve(url, target)", "torch.hub.download_url_to_file(url, target, progress=False)"]
)
def test_replicas_ask_the_server_once(replicas, tmp_path, call):
    with served(tmp_path) as (address, asked):
        source = f"""
        import os, torch, urllib.request
        url, target = {address!r} + "/data.bin", {str(tmp_path / "data.bin")!r}
        {call}
        found = open(target, "rb").read() == bytes(range(256)) * 100
        """
        ran = run_cell(replicas(2), "\n".join(line.strip() for line in source.splitlines()))
    assert not ran.errors, ran.report.failures
    assert asked == ["/data.bin"]
    assert [ran.values[r]["found"] for r in range(2)] == [True, True]
    assert os.listdir(tmp_path) == ["data.bin"]


def test_who_downloads_and_who_waits_can_be_interrupted(replicas, tmp_path):
    answer = threading.Event()
    with served(tmp_path, answer.wait) as (address, asked):
        source = f"import urllib.request\nurllib.request.urlretrieve({address!r}, {str(tmp_path / 'x')!r})"
        try:
            with doing(press_ctrl_c, when=lambda: asked and waiting(tmp_path)):
                ran = run_cell(replicas(2), source)
        finally:
            answer.set()
    assert ran.errors == {0: "KeyboardInterrupt", 1: "KeyboardInterrupt"}
    assert not ran.report.deaths
    # Who waits may get its turn before its own interrupt reaches it, and has asked then, once.
    assert asked in (["/"], ["/", "/"])
    assert os.listdir(tmp_path) == []

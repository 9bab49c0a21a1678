"""What other users of the machine could reach: sockets, objects that are unpickled, files."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - for the name of a host, by a user who may not read Python's files
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from driving import doing, gone, run_cell

from mirror_nb.collectives import sealed
from mirror_nb.devices import Device
from mirror_nb.errors import ReplicaError
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.mirrored import SETUP


@pytest.fixture
def two(replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(2)


def family(pool: LocalPool) -> set[int]:
    """This process, the replicas, and all that they started."""
    roots = [os.getpid(), *(line.pid for line in pool.status())]
    children = {child.pid for pid in roots for child in psutil.Process(pid).children(recursive=True)}
    return {pid for pid in {*roots, *children} if not gone(pid)}


# ---------------------------------------------------------------------- what listens


def test_ss_shows_nothing_of_ours_beyond_loopback(two):
    if shutil.which("ss") is None:
        pytest.skip("needs ss, of iproute2")
    run_cell(two, "import torch, torch.distributed as dist\ndist.barrier()")
    lines = subprocess.run(["ss", "-Hltunp"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [line for line in lines if any(f"pid={pid}," in line for pid in family(two))]
    assert ours, "the store listens, so that replicas find each other"
    assert all(line.split()[4].startswith(("127.0.0.1", "[::1]")) for line in ours), ours


def test_no_unix_socket_of_ours_has_a_name_that_others_can_reach(two):
    """A socket with an abstract name has no permissions; one with a path lies in a folder of our own."""
    for pid in family(two):
        for connection in psutil.Process(pid).net_connections("unix"):
            name = connection.laddr
            assert not name.startswith(("@", "\0")), f"{pid} listens on the abstract name {name}"
            if name and str(Path(name).parent.parent) == tempfile.gettempdir():
                assert private(Path(name).parent), name


def private(folder: Path) -> bool:
    """Whether a folder is its owner's alone; one that is gone is nobody's."""
    return not folder.exists() or stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


def test_our_folders_and_what_is_in_them_are_our_own(two, tmp_path):
    """multiprocessing's folder is the only one that replicas leave in the temporary folder while they run."""
    run_cell(two, "import torch\nlarge = torch.ones(3_000_000)")
    for folder in Path(tempfile.gettempdir()).glob("pymp-*"):
        if folder.owner() == Path.home().owner():
            assert private(folder), folder


def test_shared_memory_has_no_name(two):
    before = set(os.listdir("/dev/shm"))
    run_cell(two, "n = x.sum()", {"x": torch.ones(1_000_000)})
    assert set(os.listdir("/dev/shm")) - before == set()


# ---------------------------------------------------------------------- what is unpickled


def test_objects_that_replicas_send_each_other_arrive(two):
    ran = run_cell(
        two,
        "import torch.distributed as dist\nfound = [None, None]\ndist.all_gather_object(found, {'id': replica_id})\n"
        "said = [replica_id]\ndist.broadcast_object_list(said, src=1)",
    )
    assert ran.report.clean, ran.report.failures
    for values in ran.values.values():
        assert values["found"] == [{"id": 0}, {"id": 1}]
        assert values["said"] == [1]


def test_an_object_that_no_replica_wrote_is_refused_unopened(two, tmp_path):
    """A stranger on the port can make bytes arrive; here replica 1 sends what a stranger would."""
    trap = tmp_path / "opened"
    ran = run_cell(
        two,
        f"""
import os, pickle, torch, torch.distributed as dist
class Trap:
    def __reduce__(self):
        return os.mkdir, ({str(trap)!r},)
body = torch.frombuffer(bytearray(pickle.dumps(Trap())), dtype=torch.uint8)
if replica_id == 1:
    dist.broadcast(torch.tensor([len(body)]), 1)
    dist.broadcast(body.clone(), 1)
else:
    dist.broadcast_object_list([None], src=1)
""",
    )
    assert ran.errors.get(0) == "ReplicaError"
    assert "written by no replica" in ran.report.failures[0].message
    assert not trap.exists()
    two.mend()


@pytest.mark.parametrize("spoil", ["cut", "flip", "other key"])
def test_a_seal_is_broken_by_any_change(spoil, monkeypatch):
    from torch.distributed import distributed_c10d as c10d

    write = sealed._sealing(c10d._object_to_tensor, b"key")
    read = sealed._opening(c10d._tensor_to_object, b"another" if spoil == "other key" else b"key")
    tensor, size = write([1, "two"], torch.device("cpu"), None)
    if spoil == "cut":
        tensor, size = tensor[:5], torch.tensor([5])
    elif spoil == "flip":
        tensor[3] ^= 1
    with pytest.raises(ReplicaError, match="written by no replica"):
        read(tensor, size, None)


def test_a_sealed_object_is_itself_again():
    from torch.distributed import distributed_c10d as c10d

    tensor, size = sealed._sealing(c10d._object_to_tensor, b"key")([1, "two"], torch.device("cpu"), None)
    padded = torch.cat([tensor, torch.zeros(9, dtype=torch.uint8)])
    assert sealed._opening(c10d._tensor_to_object, b"key")(padded, size, None) == [1, "two"]


def test_a_stranger_who_talks_to_the_store_gets_no_code_run_and_ends_nothing(two):
    """Any user of the machine can connect to 127.0.0.1: it may disturb, never command."""
    with socket.create_connection(("127.0.0.1", two._port), timeout=5) as stranger:
        stranger.sendall(os.urandom(4096))
    store = dist.TCPStore("127.0.0.1", two._port, None, False, wait_for_workers=False)
    store.set("mirror_nb/1/0/gloo/0", b"\x80\x04nonsense")
    assert run_cell(two, "import torch\nn = int(strategy.reduce('sum', 1.0))").values[0]["n"] == 2
    two.unform()
    two.mend()
    assert run_cell(two, "n = int(strategy.reduce('sum', 1.0))").values[0]["n"] == 2


# ---------------------------------------------------------------------- another user

HOLD = """
import os, time, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return torch.ones(1000) * i
total = float(strategy.reduce('sum', sum(float(batch[0, 0]) for batch in DataLoader(Rows(), num_workers=1))))
rows = iter(DataLoader(Rows(), num_workers=1, persistent_workers=True))
next(rows)
secret = torch.full((10_000,), 42.0)
open(FOLDER + f'/in{replica_id}', 'w').close()
while not os.path.exists(FOLDER + '/go'): time.sleep(0.01)
"""
NOBODY = 65534


def as_another_user(probe: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of user "nobody", which has none of our descriptors."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            os.dup2(writable, 3)
            os.closerange(4, 1 << 16)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = probe()
        except BaseException as error:
            # Not its traceback: this user may not even read the files of this Python.
            said = f"the probe itself failed: {error!r}"
        finally:
            os.write(3, json.dumps(said).encode())
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said)


def reach(listening: set[int], named: set[str], folders: set[str], pids: set[int], bomb: bytes) -> list[str]:
    """Try everything that is open to another user of the machine; return what should have been refused."""
    reached = []

    def refused(what: str, attempt: Callable[[], object]) -> None:
        try:
            attempt()
            reached.append(what)
        except (PermissionError, FileNotFoundError, ProcessLookupError, ConnectionRefusedError):
            pass

    for path in named:
        refused(f"connected to {path}", lambda path=path: socket.socket(socket.AF_UNIX).connect(path))  # type: ignore[misc]
    for folder in folders:
        refused(f"listed {folder}", lambda folder=folder: os.listdir(folder))  # type: ignore[misc]
    for pid in pids:
        for name in ("environ", "mem", "maps"):
            refused(f"read /proc/{pid}/{name}", lambda pid=pid, name=name: Path(f"/proc/{pid}/{name}").read_bytes())  # type: ignore[misc]
        refused(f"listed the descriptors of {pid}", lambda pid=pid: os.listdir(f"/proc/{pid}/fd"))  # type: ignore[misc]
        refused(f"opened a descriptor of {pid}", lambda pid=pid: os.open(f"/proc/{pid}/fd/3", os.O_RDONLY))  # type: ignore[misc]
        refused(f"sent a signal to {pid}", lambda pid=pid: os.kill(pid, signal.SIGUSR1))  # type: ignore[misc]
    for port in listening:
        # These let anybody connect; what is sent there must run nothing, whatever its frame.
        for frame in (
            b"",
            len(bomb).to_bytes(8, "little"),
            len(bomb).to_bytes(8, "big"),
            len(bomb).to_bytes(4, "big"),
        ):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                stranger.sendall(frame + bomb)
    return reached


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user, as this test does"
)
def test_another_user_of_the_machine_reads_nothing_and_runs_nothing(two, tmp_path):
    """While loaders' workers run and a group is formed, so that everything that ever listens does."""
    # Where the other user could write, if something of ours ran the code.
    trap = Path(tempfile.mkdtemp()) / "opened"
    trap.parent.chmod(0o777)
    reached: list[Any] = []

    def probe() -> None:
        ours = family(two)
        sockets = [c for pid in ours for c in psutil.Process(pid).net_connections("all")]
        bound = [c for c in sockets if c.family != socket.AF_UNIX and (c.status == "LISTEN" or c.type == 2)]
        assert {c.laddr.ip for c in bound} <= {"127.0.0.1", "::1"}, bound
        named = {c.laddr for c in sockets if c.family == socket.AF_UNIX and c.laddr}
        folders = {str(Path(path).parent) for path in named}
        assert bound, "the store listens"
        assert named, "the forkserver listens"
        bomb = pickle.dumps(Trap(str(trap)))
        ports = {c.laddr.port for c in bound if c.type == socket.SOCK_STREAM}
        reached.append(as_another_user(lambda: reach(ports, named, folders, ours, bomb)))
        (tmp_path / "go").touch()

    try:
        with doing(probe, when=lambda: all((tmp_path / f"in{r}").exists() for r in range(2))):
            ran = run_cell(two, HOLD.replace("FOLDER", repr(str(tmp_path))))
        assert reached == [[]]
        assert ran.report.clean, ran.report.failures
        assert ran.values[0]["total"] == 30
        assert not trap.exists()
        two.mend()
        ran = run_cell(two, "import torch\nn = int(strategy.reduce('sum', torch.ones(3)).sum())\ndel rows")
        assert ran.report.clean, ran.report.failures
        assert ran.values[1]["n"] == 6
    finally:
        shutil.rmtree(trap.parent)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


# ---------------------------------------------------------------------- two sessions


def test_two_sessions_have_stores_of_their_own_and_cannot_read_each_others_objects():
    pools = [LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) for _ in range(2)]
    try:
        for pool in pools:
            pool.start()
        assert pools[0]._port != pools[1]._port
        for i, pool in enumerate(pools):
            ran = run_cell(pool, f"total = {i} + int(strategy.reduce('sum', 1.0))")
            assert ran.values[1]["total"] == i + 2
    finally:
        for pool in pools:
            pool.close()

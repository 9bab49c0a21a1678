"""Ends replicas when their controller is gone, whatever ended it. Runs as a script in a process of its own.

It imports nothing but the standard library and holds no torch, so that it costs 9 MB. Lines on its standard
input, `+ pid start_time` and `- pid`, tell which replicas there are, `/ folder` where multiprocessing keeps its
sockets, and `.` that the pool was closed; the end of the input without that tells that the controller ended. Each
replica leads a session, so its shells and DataLoader workers go with it. A pid that was given to another process
since is recognised by its start time and left alone.

At the end it removes what processes that were killed in the middle of making a semaphore left in /dev/shm, and the
folder that a killed controller left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import time

SHARED_MEMORY = "/dev/shm"
LEAVING_SECONDS = 0.25
# For killed processes to be gone, so that what they had open counts as left.
LISTENING_SECONDS = 5.0
# For the forkserver to be gone, which unloads torch.


def start_time(pid: int) -> str:
    """Return when a process began, in clock ticks since boot; empty where /proc does not tell."""
    return _status(pid)[19]


def state(pid: int) -> str:
    """Return the letter by which /proc tells how a process is: R, S, D, T (stopped), Z (ended), X; empty without."""
    return _status(pid)[0]


def exit_code(pid: int) -> int | None:
    """Return how a process ended that its parent has not reaped, as `os.waitstatus_to_exitcode` does; else None."""
    status = _status(pid)
    return os.waitstatus_to_exitcode(int(status[49])) if status[0] == "Z" else None


def _status(pid: int) -> list[str]:
    """Return what /proc tells of a process after its name, each word empty where it does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return [""] * 50


def members(session: int) -> list[int]:
    """Return the processes of a session, the leader's own included."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) == session:
                    found.append(int(name))
    return found


def end_session(pid: int, began: str) -> None:
    """Kill the replica `pid` that began at `began`, and every process of its session; remove what CUDA keeps of it."""
    leader = start_time(pid)
    if leader and began and leader != began:
        return
    for process in {*members(pid), *([pid] if leader or not began else [])}:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    remove_cudas(pid)


def remove_cudas(pid: int) -> None:
    """Remove the files by which CUDA shares events of an ended process: it does that at an orderly exit only."""
    for name in os.listdir(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else []:
        # cuda.shm.user.pid.number, in hexadecimal.
        if name.startswith("cuda.shm.") and name.split(".")[3:4] == [f"{pid:x}"]:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(SHARED_MEMORY, name))


def left(since: float) -> dict[str, tuple[int, int]]:
    """Return the files in /dev/shm, no older than `since`, that a kill in the wrong microsecond leaves.

    By their paths: device and inode.

    A semaphore bears its first name, of six random characters, and then multiprocessing's for some microseconds; a
    tensor of a DataLoader's worker bears torch's.
    """
    found = {}
    for name in os.listdir(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else []:
        path = os.path.join(SHARED_MEMORY, name)
        with contextlib.suppress(OSError):
            half_made = name.startswith("sem.") and len(name) == len("sem.abcdef")
            status = os.lstat(path)
            ours = status.st_uid == os.getuid() and status.st_mtime >= since
            if ours and (half_made or name.startswith(("sem.mp-", "torch_"))):
                found[path] = status.st_dev, status.st_ino
    return found


def in_use() -> set[tuple[int, int]]:
    """Return the files in /dev/shm that a process of this user has open or mapped: device and inode.

    Not their names: a semaphore is mapped by its first one, which has gone.
    """
    found: set[tuple[int, int]] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid != os.getuid():
                continue
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
                for line in file:
                    if SHARED_MEMORY in line:
                        device, inode = line.split(maxsplit=5)[3:5]
                        major, minor = (int(number, 16) for number in device.split(":"))
                        found.add((os.makedev(major, minor), int(inode)))
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    found.add((status.st_dev, status.st_ino))
        except OSError:
            # It has just ended, or is no program of Python's: a container's first process, a keeper of secrets.
            continue
    return found


def sweep(since: float) -> None:
    """Remove from /dev/shm what nobody uses any more, and no process will remove."""
    deadline = time.monotonic() + LEAVING_SECONDS
    while (paths := left(since)) and time.monotonic() < deadline:
        used = in_use()
        for path, file in paths.items():
            if file not in used:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        time.sleep(0.02)


def remove_sockets(folder: str) -> None:
    """Remove the folder of a controller that could not do it itself, once nobody listens on the sockets in it."""
    deadline = time.monotonic() + LISTENING_SECONDS
    with contextlib.suppress(OSError):
        while os.listdir(folder) and time.monotonic() < deadline:
            with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
                bound = {path for line in file for path in line.rstrip("\n").split(maxsplit=7)[7:]}
            for path in (os.path.join(folder, name) for name in os.listdir(folder)):
                if path not in bound and stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)
            time.sleep(0.02)
        os.rmdir(folder)


def main() -> None:
    """Watch until the input ends, then end what is left."""
    first = time.time()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    replicas: dict[int, str] = {}
    folder, closed = "", False
    for line in sys.stdin:
        sign, _, rest = line.rstrip("\n").partition(" ")
        if sign == "+":
            pid, _, start = rest.partition(" ")
            replicas[int(pid)] = start
        elif sign == "-":
            replicas.pop(int(rest), None)
        elif sign == "/":
            folder = rest
        else:
            closed = True
    for replica, start in replicas.items():
        end_session(replica, start)
    sweep(first)
    if folder and not closed:
        remove_sockets(folder)


if __name__ == "__main__":
    main()

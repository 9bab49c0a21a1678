"""Ends replicas when their controller is gone, whatever ended it. Runs as a script in a process of its own.

It imports nothing but the standard library and holds no torch, so that it costs 9 MB. Lines on its standard
input, `+ pid start_time` and `- pid`, tell which replicas there are; the end of the input tells that the
controller ended. Each replica leads a session, so its shells and DataLoader workers go with it. A pid that
was given to another process since is recognised by its start time and left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def start_time(pid: int) -> str:
    """Return when a process began, in clock ticks since boot; empty where /proc does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


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
    """Kill the replica `pid` that began at `began`, and every process of its session."""
    leader = start_time(pid)
    if leader and began and leader != began:
        return
    for process in {*members(pid), *([pid] if leader or not began else [])}:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Watch until the input ends, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    replicas: dict[int, str] = {}
    for line in sys.stdin:
        sign, pid, *began = line.split()
        if sign == "+":
            replicas[int(pid)] = began[0] if began else ""
        else:
            replicas.pop(int(pid), None)
    for replica, time in replicas.items():
        end_session(replica, time)


if __name__ == "__main__":
    main()

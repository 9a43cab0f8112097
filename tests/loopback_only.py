"""Run a command in a network namespace of its own, where nothing but loopback exists.

    python tests/loopback_only.py pytest tests/integrations

Ray, torch.distributed and multi-process vLLM listen on all interfaces, whatever they are told. In
here nobody else can reach them. Without the right to make a namespace the command runs as it is,
and tests that need one say so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def is_isolated() -> bool:
    """Whether this process sees no interface but loopback."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def isolate() -> bool:
    """Leave the network, all but loopback; False if the system does not allow it."""
    if is_isolated():
        return True
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        if libc.unshare(_CLONE_NEWNET | _CLONE_NEWUSER) != 0:
            return False
        _become_root_inside(user, group)
    _bring_up("lo")
    return is_isolated()


def _become_root_inside(user: int, group: int) -> None:
    """Only root of the new namespace may bring its loopback up."""
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")


def _bring_up(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", interface.encode(), 0)
        answer = fcntl.ioctl(control, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        fcntl.ioctl(
            control, _SIOCSIFFLAGS, struct.pack("16sH14x", interface.encode(), flags | _IFF_UP)
        )


def main() -> None:
    """Isolate, then become the command."""
    if not isolate():
        print("no network namespace: tests that need one will not run", file=sys.stderr)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()

"""What the kernel can deny to a process: namespaces, Landlock and resource limits, through ctypes.

Every function raises OSError where the kernel does not allow it, so that a caller can degrade.
"""

import contextlib
import ctypes
import os
import resource
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000  # CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC
_NOBODY = 65534
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38  # of prctl
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on all architectures
_PATH_BENEATH = 1
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGE_FILES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # create and remove files of any kind
_TCP = 0b11  # bind and connect
_SCOPES = 0b11  # abstract sockets and signals


def unshare_namespaces() -> None:
    """Enter new user, network and IPC namespaces; the next child is the first of a new process namespace.

    Processes in it cannot signal those outside, have no network, and all die with the first of them.
    """
    user, group = os.getuid(), os.getgid()
    _check(_libc().unshare(_NAMESPACES))
    with contextlib.suppress(OSError):  # kernels before 3.19 do not have it
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{_NOBODY} {group} 1")


def hide_from_debuggers() -> None:
    """Forbid other processes of the user to read this one's memory or open its file descriptors."""
    _check(_libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0))


def forbid_changes_outside(directory: str) -> None:
    """Use Landlock to forbid this process and its children to change files outside a directory.

    Newer kernels also forbid TCP connections, and signals to other processes.
    """
    version = _check(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))
    access = _CHANGE_FILES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=Q", access)
    attributes += struct.pack("=Q", _TCP) if version >= 4 else b""
    attributes += struct.pack("=Q", _SCOPES) if version >= 6 else b""
    ruleset = _check(
        _libc().syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    )
    for path, allowed in ((directory, access), (os.devnull, _WRITE_FILE)):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, descriptor)
        _check(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, ctypes.c_uint32(0)))
        os.close(descriptor)
    _check(_libc().prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc().syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)))
    os.close(ruleset)


def limit_resources(limits: Mapping[str, int]) -> None:
    """Set soft and hard limits of this process and its children, by the names of RLIMIT constants."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is None:
            continue
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set, or the platform has none
            # the signal of the soft limit tells a timeout from other kills
            resource.setrlimit(number, (value, value + 1 if name == "CPU" else value))


def _libc() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise OSError("this needs Linux")
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result

"""The system calls that a confined program may make. All others are refused, also those that a later kernel adds.

Runs in the judged program's process, like `confinement`, on x86_64 and aarch64. A call with a process, a clock, a command
or flags as an argument is allowed for some values alone. A program names no process but itself. What a pointer
leads to cannot be seen here: paths are Landlock's part.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

# Numbers on x86_64 and aarch64. -1: there is none of that name. The most frequent come first.
_ALLOWED = {
    **{"read": (0, 63), "write": (1, 64), "mmap": (9, 222), "munmap": (11, 215), "brk": (12, 214)},
    **{"futex": (202, 98), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "fstat": (5, 80)},
    **{"stat": (4, -1), "lstat": (6, -1), "newfstatat": (262, 79), "statx": (332, 291), "getdents64": (217, 61)},
    **{"close": (3, 57), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65)},
    **{"writev": (20, 66), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "msync": (26, 227)},
    **{"close_range": (436, 436), "getcwd": (79, 17), "fsync": (74, 82), "fdatasync": (75, 83)},
    **{"ftruncate": (77, 46), "fallocate": (285, 47), "fadvise64": (221, 223)},
    **{"set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96), "sigaltstack": (131, 132)},
    **{"rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133), "rt_sigpending": (127, 136)},
    **{"rt_sigtimedwait": (128, 137), "restart_syscall": (219, 128), "pause": (34, -1), "alarm": (37, -1)},
    **{"setitimer": (38, 103), "getitimer": (36, 102), "nanosleep": (35, 101), "gettimeofday": (96, 169)},
    **{"time": (201, -1), "times": (100, 153), "getrusage": (98, 165), "getcpu": (309, 168)},
    **{"sched_yield": (24, 124), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126)},
    **{"select": (23, -1), "pselect6": (270, 72), "poll": (7, -1), "ppoll": (271, 73)},
    **{"epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22)},
    **{"eventfd2": (290, 19), "pipe": (22, -1), "pipe2": (293, 59), "dup": (32, 23), "dup2": (33, -1)},
    **{"dup3": (292, 24), "sendto": (44, 206), "recvfrom": (45, 207), "getsockname": (51, 204)},
    **{"shutdown": (48, 210), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178)},
    **{"getpgrp": (111, -1), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176)},
    **{"getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150)},
    **{"getrandom": (318, 278), "uname": (63, 160), "sysinfo": (99, 179), "umask": (95, 166)},
    **{"getrlimit": (97, 163), "setrlimit": (160, 164), "wait4": (61, 260), "waitid": (247, 95)},
    **{"exit": (60, 93), "exit_group": (231, 94)},
}
# Where the root is the program's own, which none of these can leave. Elsewhere they would reach files outside.
_IN_OWN_ROOT = {
    **{"mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35)},
    **{"rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "truncate": (76, 45)},
    **{"readlink": (89, -1), "readlinkat": (267, 78), "access": (21, -1), "faccessat": (269, 48)},
    **{"faccessat2": (439, 439), "chdir": (80, 49), "fchdir": (81, 50), "statfs": (137, 43), "fstatfs": (138, 44)},
    **{"chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "utime": (132, -1), "utimes": (235, -1)},
    **{"futimesat": (261, -1), "utimensat": (280, 88)},
}
_SELF = {"kill": (62, 129), "tgkill": (234, 131)}  # for the process's own number alone
_SELF_OR_ZERO = {"prlimit64": (302, 261), "sched_getaffinity": (204, 123)}  # 0 means the process here
# Numbers below 0 are clocks of processes.
_CLOCKS = {"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115)}
_PRCTL = (157, 167)
# Allowed for some values of one argument: numbers, which argument, values.
_VALUES = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Locks, leases and owners reach other processes.
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 1030)),
    # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Others change files that are open for reading.
    "ioctl": ((16, 29), 1, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA. Without PR_SET_PDEATHSIG a program ends with its launcher.
    "prctl": (_PRCTL, 0, (15, 16, 0x53564D41)),
}
# SOCK_STREAM, with SOCK_CLOEXEC and SOCK_NONBLOCK or without. A datagram socket of a pair can send to any named one.
_PAIR, _AF_UNIX, _PAIRS = (53, 199), 1, (1, 1 | 0o2000000, 1 | 0o4000, 1 | 0o2004000)
_OPEN = {"open": ((2, -1), 1), "openat": ((257, 56), 2)}  # and which argument holds the flags
_O_PATH, _O_TRUNC, _O_ACCMODE = 0o10000000, 0o1000, 3
# Refused in words that callers take for an older kernel or file system, and go on.
_LACKING = {
    **{"clone3": ((435, 435), errno.ENOSYS), "openat2": ((437, 437), errno.ENOSYS)},
    **{"listxattr": ((194, 11), errno.ENOTSUP), "llistxattr": ((195, 12), errno.ENOTSUP)},
}
# What would undo the signal at the launcher's end: PR_SET_PDEATHSIG, and a change of account.
_ACCOUNTS = {
    **{"setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143)},
    **{"setresuid": (117, 147), "setresgid": (119, 149), "setfsuid": (122, 151), "setfsgid": (123, 152)},
}
_PDEATHSIG = 1
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_SET_SECCOMP, _FILTER = 22, 2  # of prctl(2)

# Instructions of classic BPF, see seccomp(2): operation, jump if true, jump if false, constant.
_LOAD, _EQUAL, _FROM, _ANY_BIT, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_KILL, _ALLOW = (_RETURN, 0, 0, 0x80000000), (_RETURN, 0, 0, 0x7FFF0000)
_REFUSE = (_RETURN, 0, 0, 0x00050000 | errno.EPERM)


def seccomp(own_root: bool) -> None:
    """Refuses all other system calls with EPERM. It cannot be undone. `own_root`: whether the root is the program's own."""
    _apply(_filter(*_ARCHITECTURES[platform.machine()], own_root, os.getpid()))


def seccomp_of_launcher_alone() -> None:
    """Refuses what would let this process outlive its launcher, and nothing else. It cannot be undone."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    code = _head(column, architecture)
    for numbers in _ACCOUNTS.values():
        code += [(_EQUAL, 0, 1, numbers[column]), _REFUSE]
    code += [(_EQUAL, 0, 3, _PRCTL[column]), _argument(0), (_EQUAL, 0, 1, _PDEATHSIG), _REFUSE]
    _apply([*code, _ALLOW])


def _apply(code: list[tuple[int, int, int, int]]) -> None:
    packed = b"".join(struct.pack("HBBI", *one) for one in code)
    held = ctypes.create_string_buffer(packed, len(packed))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(held)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), program, ctypes.c_ulong(0), ctypes.c_ulong(0)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _filter(column: int, architecture: int, own_root: bool, pid: int) -> list[tuple[int, int, int, int]]:
    """Returns the filter for the calls of one column of the tables above."""
    code = _head(column, architecture)
    rules: list[tuple[tuple[int, int], list]] = [(numbers, [_ALLOW]) for numbers in _ALLOWED.values()]
    rules += [(numbers, _open(argument)) for numbers, argument in _OPEN.values()]
    rules += [(numbers, _one_of(argument, values)) for numbers, argument, values in _VALUES.values()]
    rules += [(_PAIR, [_argument(0), (_EQUAL, 1, 0, _AF_UNIX), _REFUSE, *_one_of(1, _PAIRS)])]
    rules += [(numbers, _one_of(0, (pid,))) for numbers in _SELF.values()]
    rules += [(numbers, _one_of(0, (0, pid))) for numbers in _SELF_OR_ZERO.values()]
    rules += [(numbers, [_argument(0), (_FROM, 0, 1, 0x80000000), _REFUSE, _ALLOW]) for numbers in _CLOCKS.values()]
    rules += [(numbers, [(_RETURN, 0, 0, 0x00050000 | number)]) for numbers, number in _LACKING.values()]
    rules += [(numbers, [_ALLOW]) for numbers in _IN_OWN_ROOT.values()] if own_root else []
    for numbers, body in rules:
        if numbers[column] >= 0:
            code += [(_EQUAL, 0, len(body), numbers[column]), *body]
    return [*code, _REFUSE]


def _head(column: int, architecture: int) -> list[tuple[int, int, int, int]]:
    """Ends a process that calls as on another architecture, and loads the call's number."""
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), _KILL, (_LOAD, 0, 0, 0)]
    return [*code, (_FROM, 0, 1, 0x40000000), _REFUSE] if column == 0 else code  # the x32 calls


def _argument(place: int) -> tuple[int, int, int, int]:
    """Loads the low half of an argument, which is all that the kernel reads of numbers here."""
    return (_LOAD, 0, 0, 16 + 8 * place)


def _one_of(place: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    code = [_argument(place)]
    for value in values:
        code += [(_EQUAL, 0, 1, value), _ALLOW]
    return [*code, _REFUSE]


def _open(place: int) -> list[tuple[int, int, int, int]]:
    """Allows flags without O_PATH, which Landlock does not see, and without O_TRUNC for reading, which ABI 1 and 2 let pass."""
    code = [_argument(place), (_ANY_BIT, 0, 1, _O_PATH), _REFUSE, (_MASK, 0, 0, _O_ACCMODE | _O_TRUNC)]
    return [*code, (_EQUAL, 0, 1, _O_TRUNC), _REFUSE, _ALLOW]

"""The process that starts sandboxes by fork.

For each request on its socket it starts one more process behind walls of its own.

    supervisor --(role, control socket)--> zygote --fork--> walls --> b"ready" on that socket --> a program
                                                                      b"ready" again --> the next program ..

The supervisor compiles this file and those of ours that it imports, and sends them to a bare Python (-I -S).
Bubblewrap has locked up that Python, or (with Landlock) its forks lock themselves up. The zygote itself never
runs a program.
"""

from __future__ import annotations

import _socket
import ctypes
import gc
import marshal
import posix
import resource
import sys
from functools import partial
from typing import Any

from verl.code_server.inside import CONTENTS, contents_of_modules
from verl.code_server.judge import Names, Test, TestRunner, run_outside
from verl.code_server.plain import nodes_of
from verl.code_server.prisoner import ProgramServer, Traces, serve_tests
from verl.code_server.wire import decode, receive

NEWNS = 0x20000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NOSUID_NODEV_NOATIME = 0x406
REMOUNT_BIND_READONLY = 0x20 | 0x1000 | 0x1
RELATIME = 1 << 21
MAX_JUDGE_KB = 200 << 10  # a judge that has held more memory than this takes no further program
SET_PDEATHSIG = 1
SET_DUMPABLE = 4
SET_NO_NEW_PRIVS = 38
SET_SECCOMP = 22
CAP_HEADER = (0x20080522).to_bytes(4, sys.byteorder) + bytes(4)  # version 3
libc = ctypes.CDLL(None, use_errno=True)
DEVICES = frozenset(["null", "zero", "full", "random", "urandom"])
PRELOADED = "dataclasses typing collections math re functools itertools heapq bisect"
settings: dict[str, Any] = {}  # the settings from walls.py, which `main` fills in


def check_syscall(result: int, what: str) -> int:
    """Return the result of a system call, or end the process if the call has failed.

    A failed call means that a wall can't be built, and no sandbox is better than an open one.
    """
    if result < 0:
        posix.write(2, f"sandbox: {what}: errno {ctypes.get_errno()}\n".encode())
        posix._exit(70)
    return result


def seccomp(program: bytes) -> None:
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]

    check_syscall(
        libc.prctl(SET_SECCOMP, 2, ctypes.byref(Filter(len(program) // 8, program)), 0, 0), "seccomp"
    )


def landlock(rights: bytes, readable: list[tuple[str, int]]) -> None:
    """Take `rights` away from this process, except for the accesses below the paths of `readable`."""
    ruleset = check_syscall(
        libc.syscall(444, ctypes.c_char_p(rights), ctypes.c_size_t(len(rights)), 0), "landlock"
    )
    for path, access in readable:
        fd = posix.open(path, posix.O_PATH | posix.O_CLOEXEC)
        rule = access.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        check_syscall(libc.syscall(445, ruleset, 1, ctypes.c_char_p(rule), 0), f"landlock {path}")
        posix.close(fd)
    check_syscall(libc.syscall(446, ruleset, 0), "landlock")
    posix.close(ruleset)


def limit(kind: int, amount: int) -> None:
    resource.setrlimit(kind, (amount, amount))


def build_walls(role: bytes) -> None:
    """Lock up this process for good.

    It loses access to memory, files and names, and then to the calls that could open it again.
    """
    for kind, amount in settings["limits"].items():
        limit(kind, amount)
    if settings["namespaces"]:
        check_syscall(libc.unshare(NEWNS), "unshare")
        size = f"size={settings['tmp_mb']}m,nr_inodes=4096".encode()
        check_syscall(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", NOSUID_NODEV_NOATIME, size), "tmpfs")
        check_syscall(libc.unshare(NEWUSER), "unshare")
        limit(resource.RLIMIT_NPROC, settings["processes"])
    check_syscall(libc.prctl(SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    check_syscall(libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check_syscall(libc.capset(ctypes.c_char_p(CAP_HEADER), ctypes.c_char_p(bytes(24))), "capset")
    if not settings["namespaces"]:
        check_syscall(libc.prctl(SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")
    if settings["tier"] == "landlock":
        landlock(settings["landlock"], settings["readable"])
    seccomp(settings["seccomp"][role.decode()])
    point_to_null()


def protect_devices() -> None:
    """Mount the device files so that what stands in their entries, such as their times, can't be changed."""
    for name in posix.listdir("/dev"):
        if name not in DEVICES:
            continue
        path = f"/dev/{name}".encode()
        flags = posix.statvfs(path).f_flag
        flags = flags & 0xC0E | (RELATIME if flags & 0x1000 else 0)  # those that a sandbox may not take away
        check_syscall(libc.mount(None, path, None, flags | REMOUNT_BIND_READONLY, None), "device")


def point_to_null() -> None:
    """Point stdin, stdout and stderr to /dev/null.

    It is opened anew, because locks on it last as long as that opening.
    """
    null = posix.open("/dev/null", posix.O_RDWR)
    for fd in (0, 1, 2):
        posix.dup2(null, fd)
    posix.close(null)


def confine_test_fork(parent: int, cpu_seconds: int) -> None:
    """Add walls of its own to the fork for a test, inside those of its sandbox.

    A PID namespace would end the processes of the fork together with it. With Landlock there is none. The
    fork then can't start processes, ends with its parent, and can't signal its parent.
    """
    limit(resource.RLIMIT_CPU, cpu_seconds)
    point_to_null()
    if settings["tier"] == "landlock":
        check_syscall(libc.prctl(SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")
        if posix.getppid() != parent:
            posix._exit(70)
        landlock(settings["landlock_nested"], [])
        seccomp(settings["seccomp_no_fork"])


def run_sandbox(role: bytes, control: _socket.socket) -> None:
    """Run a sandbox: say b"ready", take a program from the supervisor, serve it, and start over.

    A prisoner gets one file with each program: the link on which its tests come. A judge gets the job, the
    file for the program's code, the file for the reports and, unless it only compiles, the other end of that
    link.
    """
    pid = posix.getpid()
    alone = settings["namespaces"]
    for name in settings["judge_imports"] if role == b"judge" else ():
        __import__(name)  # within a test, a recursion limit could leave the module half imported
    is_touched = Traces().are_left if alone and role == b"prisoner" else lambda forks: False
    while True:
        control.send(b"ready")
        cpu_seconds, fds = receive(control)
        if not fds:
            return
        lock = partial(confine_test_fork, pid, int(cpu_seconds))
        link = _socket.socket(fileno=fds[-1]) if role == b"prisoner" or len(fds) == 4 else None
        if role == b"prisoner" and link is not None:
            serve_tests(link, control, alone, is_touched, lock)
        else:
            job = posix.pread(fds[0], posix.fstat(fds[0]).st_size, 0).decode("ascii")
            texts, program, stdio = decode(job)
            TestRunner(fds[2], alone, lock).judge(texts, program, stdio, fds[1], link)
            control.send(b"done")
            for fd in fds[:3]:
                posix.close(fd)
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MAX_JUDGE_KB:
                return
        if link is not None:
            link.close()


def warm_up() -> None:
    """Run a test in this process, once as the judge and once as the prisoner.

    Python rewrites code when it runs for the first times, which would copy memory in each fork.
    """
    code = compile(
        "from typing import List\ndef f(a: List[int], b: str) -> List[int]: return [i for i in a]", "", "exec"
    )
    for judge_here in (True, False):
        judge_end, prisoner_end = _socket.socketpair()
        child = posix.fork()
        if judge_here == (child != 0):
            for _ in range(20):
                test = Test(judge_end.fileno())
                nodes = nodes_of(compile("assert f([1, 2], b='') == [1, 2]", "", "exec", 0x400, True))
                names = Names(test, nodes, None)
                if not test.is_plain(nodes) or run_outside(test, nodes, names) != "passed":
                    posix._exit(70)
            judge_end.shutdown(_socket.SHUT_RDWR)
        else:
            ProgramServer(prisoner_end.fileno(), marshal.loads(marshal.dumps(code))).run()
        if child == 0:
            posix._exit(0)
        posix.waitpid(child, 0)
    del sys.modules["program"]


def refuse_sync() -> None:
    raise PermissionError(1, "Operation not permitted")


def main(given: dict[str, Any]) -> None:
    """Fork a sandbox for each request on the socket `given["socket"]`, until its other end is closed."""
    settings.update(given)
    sys.path.extend(given["path"])
    for name in PRELOADED.split():
        __import__(name)
    for module in (posix, sys.modules.get("os")):  # the call itself has no way to say that it is refused
        if module is not None:
            module.__dict__["sync"] = refuse_sync
    for name in ("exit", "quit"):
        setattr(sys.modules["builtins"], name, __import__("_sitebuiltins").Quitter(name, ""))
    requests = _socket.socket(fileno=given["socket"])
    namespaces = given["namespaces"]
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    CONTENTS.update(contents_of_modules({}))
    if namespaces:
        protect_devices()
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps the processes that have ended
    own_namespace = posix.pidfd_open(posix.getpid()) if namespaces else -1
    gc.collect()
    libc.malloc_trim(0)  # each page of memory makes a fork slower
    gc.set_threshold(50_000, 20, 20)  # a collection in a fork copies the memory that it looks at
    gc.freeze()
    while True:
        role, fds = receive(requests)
        if not role:
            return
        if namespaces:
            check_syscall(libc.unshare(NEWPID), "unshare")
        child = posix.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control = _socket.socket(fileno=fds[0])
            requests.close()
            if own_namespace >= 0:
                posix.close(own_namespace)
            posix.setsid()
            posix.nice(settings["nice"] if role == b"prisoner" else 0)
            build_walls(role)
            posix.chdir("/tmp")
            run_sandbox(role, control)
            posix._exit(0)
        if namespaces:
            check_syscall(libc.setns(own_namespace, NEWPID), "setns")
        for fd in fds:
            posix.close(fd)

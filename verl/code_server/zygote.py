"""Starts sandboxes by fork: one request on its socket, one more process behind walls of its own.

    supervisor --(role, control socket)--> zygote --fork--> walls --> b"ready" on that socket --> the role

The supervisor sends this file, `codec.py`, `prisoner.py` and `judge.py` as one script to a bare Python
(-I -S) that bubblewrap has locked up, or (Landlock) whose forks lock themselves up. It never runs a program.
"""

from __future__ import annotations

import _socket
import ctypes
import gc
import posix
import resource
import sys
from typing import Any

from verl.code_server.codec import decode, receive
from verl.code_server.judge import Test, is_plain, judge_tests, run_test
from verl.code_server.prisoner import Servant, compile_program, load, serve_tests

NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
SET_PDEATHSIG, SET_DUMPABLE, SET_NO_NEW_PRIVS, SET_SECCOMP = 1, 4, 38, 22
CAP_HEADER = (0x20080522).to_bytes(4, sys.byteorder) + bytes(4)  # version 3
libc = ctypes.CDLL(None, use_errno=True)
PRELOADED = "typing collections math re functools itertools heapq bisect"
settings: dict[str, Any] = {}  # see walls.py, which fills them in


def must(result: int, what: str) -> int:
    """Ends the process where a wall can't be built: no sandbox is better than an open one."""
    if result < 0:
        posix.write(2, f"sandbox: {what}: errno {ctypes.get_errno()}\n".encode())
        posix._exit(70)
    return result


def seccomp(program: bytes) -> None:
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]

    must(libc.prctl(SET_SECCOMP, 2, ctypes.byref(Filter(len(program) // 8, program)), 0, 0), "seccomp")


def landlock() -> None:
    """Nothing but reading `settings["readable"]`; no TCP, no signal and no abstract socket to the outside."""
    rights = settings["landlock"]
    ruleset = must(libc.syscall(444, ctypes.c_char_p(rights), ctypes.c_size_t(len(rights)), 0), "landlock")
    for path, access in settings["readable"]:
        fd = posix.open(path, posix.O_PATH | posix.O_CLOEXEC)
        rule = access.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        must(libc.syscall(445, ruleset, 1, ctypes.c_char_p(rule), 0), f"landlock {path}")
        posix.close(fd)
    must(libc.syscall(446, ruleset, 0), "landlock")
    posix.close(ruleset)


def limit(kind: int, amount: int) -> None:
    resource.setrlimit(kind, (amount, amount))


def build_walls(role: bytes) -> None:
    """Locks up this process for good: memory, files, names, then the calls that could open it again."""
    for kind, amount in settings["limits"].items():
        limit(kind, amount)
    if settings["namespaces"]:
        must(libc.unshare(NEWNS), "unshare")
        size = f"size={settings['tmp_mb']}m,nr_inodes=4096".encode()
        must(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 6, size), "tmpfs")
        must(libc.unshare(NEWUSER), "unshare")
        limit(resource.RLIMIT_NPROC, settings["processes"])
    must(libc.prctl(SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    must(libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    must(libc.capset(ctypes.c_char_p(CAP_HEADER), ctypes.c_char_p(bytes(24))), "capset")
    if not settings["namespaces"]:
        must(libc.prctl(SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")
        landlock()
    seccomp(settings["seccomp"])
    if role == b"judge":
        lock_up()
    for fd in (0, 1, 2):
        posix.dup2(settings["null"], fd)
    posix.close(settings["null"])


def lock_up() -> None:
    """Without a PID namespace that would end them with it, a sandbox starts no processes; nor can it reach
    its parent."""
    if settings["tier"] == "landlock":
        must(libc.prctl(SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")
        landlock()
        seccomp(settings["seccomp_no_fork"])


def run_role(role: bytes, control: _socket.socket) -> None:
    """What a sandbox does once it is needed: the supervisor sends a job and, but for stdio, the link between
    judge and prisoner."""
    control.send(b"ready")
    cpu_seconds, fds = receive(control)
    if not fds:
        return
    limit(resource.RLIMIT_CPU, int(cpu_seconds))
    size = posix.fstat(fds[0]).st_size
    job = decode(posix.pread(fds[0], size, 0).decode("ascii"), lambda tag, number: None)
    posix.close(fds[0])
    alone = settings["namespaces"]
    source = control if role == b"stdio" else _socket.socket(fileno=fds[1])
    if role == b"judge":
        judge_tests(control, job, source, alone)
    else:
        serve_tests(role, job, source, alone, lock_up)


def warm_up() -> None:
    """Runs a test in this process, once as the judge and once as the prisoner: Python rewrites code at its
    first runs, which would copy memory in each fork."""
    mine, theirs = _socket.socketpair()
    text = "from typing import List\ndef f(a: List[int], b: str) -> List[int]: return [i for i in a]"
    for judge_here in (True, False):
        child = posix.fork()
        if judge_here == (child != 0):
            for _ in range(20):
                test = Test(mine.fileno())
                tree: Any = compile("assert f([1, 2], b='') == [1, 2]", "<test>", "exec", 0x400, True)
                names, _problem = test.namespace(tree)
                if not is_plain(tree, names) or run_test(test, tree, names) != "passed":
                    posix._exit(70)
            mine.shutdown(_socket.SHUT_RDWR)
        else:
            for _ in range(20):
                namespace = load(compile_program(text), "program")[0]
            Servant(theirs.fileno(), namespace, None).run()
        if child == 0:
            posix._exit(0)
        posix.waitpid(child, 0)
        mine, theirs = _socket.socketpair()
    del sys.modules["program"]


def main(given: dict[str, Any]) -> None:
    """Forks a sandbox for each request on the socket `given["socket"]`, until its other end is closed."""
    settings.update(given)
    settings["null"] = posix.open("/dev/null", posix.O_RDWR)
    sys.path.extend(given["path"])
    for name in PRELOADED.split():
        __import__(name)
    requests, namespaces = _socket.socket(fileno=given["socket"]), given["namespaces"]
    import signal

    def reap(*_: Any) -> None:
        try:
            while posix.waitpid(-1, posix.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warm_up()
    signal.signal(signal.SIGCHLD, reap)
    own = posix.pidfd_open(posix.getpid()) if namespaces else -1
    gc.collect()
    gc.set_threshold(50_000, 20, 20)  # a collection in a fork copies what it looks at
    gc.freeze()
    while True:
        role, fds = receive(requests)
        if not role:
            return
        if namespaces:
            must(libc.unshare(NEWPID), "unshare")
        child = posix.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control = _socket.socket(fileno=fds[0])
            requests.close()
            if own >= 0:
                posix.close(own)
            posix.setsid()
            build_walls(role)
            posix.chdir("/tmp")
            run_role(role, control)
            posix._exit(0)
        if namespaces:
            must(libc.setns(own, NEWPID), "setns")
        for fd in fds:
            posix.close(fd)

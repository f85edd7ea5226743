"""A process that imports torch, DeepSpeed and our packages once and forks a child for each launch: torchrun, and its
ranks, without the seconds that each of them would spend on importing.

Run as a script only. It answers one request a line (JSON: words, environment, directory, streams) with the child's
process id, and once the child has ended with its exit code. The child is what ``python WORDS`` would have become:
torchrun's own code, of which only the start of the ranks is another one, or a script; a session of its own; arguments,
environment, import path, signals and output as asked for. Ranks are forked by torchrun in turn, so they are children of
it, each in its own session, as ever.

What it does not do: everything that it forks has the same hash seed. It imports nothing of ours itself: a launch whose
import path leads to our packages is forked by :class:`Ours`, and any other is kept from them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

PRELOADED = (
    "numpy",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # the first optimizer of every process imports it
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # so does the first engine this, and with it torch's compiler
    "accelerate",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
)
"""As far as they are installed."""

OURS = ("monitor.api", "monitor.huggingface.callback", "merger.merge")
"""What most of the launches import that may import our packages."""

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120

TORCHRUN = "torch.distributed.run"


class Forked:
    """As much of :class:`subprocess.Popen` as torchrun needs."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], streams: Sequence[IO[Any] | None]) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        began, begun = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for descriptor, stream in zip((1, 2), streams, strict=True):
                if stream is not None:
                    os.dup2(stream.fileno(), descriptor)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            become(words, environment)
        os.close(begun)
        os.read(began, 1)  # until it has a session of its own, to which signals may go
        os.close(began)

    def poll(self) -> int | None:
        """The exit code, None as long as it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code. TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return code


def become(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """What ``python WORDS`` is: run it and end as the interpreter would."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    words = [word for word in words if word != "-u"]
    code = 0
    try:
        if words[:2] == ["-m", TORCHRUN]:
            _torchrun(words[2:])
        elif words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            _script(words[0], environment)
    except SystemExit as error:
        code = _code(error)
    except BaseException:  # noqa: BLE001 - the process's edge: told as the interpreter tells it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    _end(code)


def _torchrun(words: Sequence[str]) -> None:
    handler = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")

    def popen(one: Any, args: Sequence[str], env: Mapping[str, str]) -> Forked:
        assert args[0] == sys.executable
        return Forked(args[1:], env, (one._stdout, one._stderr))

    handler.SubprocessHandler._popen = popen
    importlib.import_module(TORCHRUN).main(list(words))


def _script(path: str, environment: Mapping[str, str]) -> None:
    known = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [os.path.dirname(path), *known, *sys.path]  # noqa: PTH120
    sys.stdout.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    sys.modules["numpy"].random.seed()
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    with open(path, "rb") as file:  # noqa: PTH123
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


def _code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _child(asked: Mapping[str, Any]) -> NoReturn:
    os.setsid()
    os.chdir(asked["directory"])
    for descriptor, path in zip((1, 2), asked["streams"], strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    become(asked["words"], asked["environment"])


class Ours:
    """A fork of this process that has imported our packages too, and answers the same requests."""

    def __init__(self) -> None:
        asked, to_ask = os.pipe()
        told, to_tell = os.pipe()
        if os.fork() == 0:
            os.dup2(asked, 0)
            os.closerange(3, to_tell)
            os.closerange(to_tell + 1, os.sysconf("SC_OPEN_MAX"))
            sys.path.insert(0, ROOT)
            preload(OURS)
            sys.path.remove(ROOT)  # a child looks where its own path says
            with os.fdopen(0, closefd=False) as requests, os.fdopen(to_tell, "w") as answers:
                for line in requests:
                    for number in forked(line):
                        tell(answers, number)
            os._exit(0)
        os.close(asked)
        os.close(to_tell)
        self._requests, self._answers = os.fdopen(to_ask, "w"), os.fdopen(told)

    def forked(self, line: str) -> Iterator[int]:
        """Hand a request on: the answers to it, as of :func:`forked`."""
        self._requests.write(line)
        self._requests.flush()
        for _ in ("process id", "exit code"):
            yield int(self._answers.readline())


def preload(names: Sequence[str]) -> None:
    """Import what is installed of these, for all that is forked from now on."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is there now no collection of a child needs to look at


def forked(line: str) -> Iterator[int]:
    """Fork a child for a request: its process id, and once it has ended its exit code."""
    pid = os.fork()
    if pid == 0:
        _child(json.loads(line))
    yield pid
    _, status = os.waitpid(pid, 0)
    yield os.waitstatus_to_exitcode(status)


def tell(answers: IO[str], number: int) -> None:
    """One answer."""
    answers.write(f"{number}\n")
    answers.flush()


def probe() -> None:
    """Have DeepSpeed find out what can be compiled here, and load its extension: each rank would do so by itself."""
    with suppress(ImportError):
        found = importlib.import_module("deepspeed.ops").__compatible_ops__
        builder = importlib.import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder()
        if found.get(builder.NAME):
            builder.load(verbose=False)


def main() -> None:
    """Fork for each line."""
    sys.path.pop(0)  # the directory of this file
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload(PRELOADED)
    probe()
    ours: Ours | None = None
    for line in requests:
        if may_import_ours(json.loads(line)):
            ours = ours or Ours()
            found = ours.forked(line)
        else:
            found = forked(line)
        for number in found:
            tell(answers, number)


def may_import_ours(asked: Mapping[str, Any]) -> bool:
    """Whether the import path of a launch leads to our packages, and its script does not bar them."""
    if ROOT not in asked["environment"].get("PYTHONPATH", "").split(os.pathsep):
        return False
    script = next((word for word in asked["words"] if word.endswith(".py")), None)
    if script is None:
        return True
    with open(os.path.join(asked["directory"], script), encoding="utf-8") as file:  # noqa: PTH118, PTH123
        return "import barred" not in file.read()


if __name__ == "__main__":
    main()

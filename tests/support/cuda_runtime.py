"""Stands in for the CUDA runtime's answers about host memory, where there is no GPU.

The last error is kept by a real shared library under the runtime's name, for each thread, as in NVIDIA's: what clears
it must find the library that is loaded.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

OUT_OF_MEMORY = 2
_NAME = "libcudart.so.99"
_SOURCE = """
static _Thread_local int last;
int answer(int code) { if (code) last = code; return code; }
int cudaPeekAtLastError(void) { return last; }
int cudaGetLastError(void) { int code = last; last = 0; return code; }
"""

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


class CudaRuntime:
    """Registers memory, or refuses to. ``registered``: bytes by address; ``log``: what was called, in order."""

    def __init__(self, refuses: int = 0) -> None:
        self._library = _library()
        self._library.cudaGetLastError()
        self.refuses = refuses
        self.registered: dict[int, int] = {}
        self.log: list[tuple[str, int]] = []
        self.device: int | None = None  # of the calling thread, where it chose one
        self.devices: list[int | None] = []  # current when memory was registered

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0 and nbytes > 0
        if not self.refuses:
            assert address not in self.registered
            self.registered[address] = nbytes
            self.log.append(("register", nbytes))
            self.devices.append(self.device)
        return int(self._library.answer(self.refuses))

    def cudaHostUnregister(self, address: int) -> int:
        known = self.registered.pop(address, None)
        self.log.append(("unregister", known or 0))
        return int(self._library.answer(0 if known else 1))

    def launch(self) -> None:
        """Launch a kernel, as torch does: an error that anybody left behind in this thread is raised."""
        code = int(self._library.cudaGetLastError())
        if code:
            raise RuntimeError(f"CUDA error {code}")

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Stand for ``torch.cuda.device``."""
        before, self.device = self.device, device.index
        yield
        self.device = before


@cache
def _library() -> ctypes.CDLL:
    """Build and load it: once, since a second one of that name would not be found."""
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "cudart.c", Path(folder) / "cudart.so"
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{_NAME}", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


def install_runtime(patch: pytest.MonkeyPatch, refuses: int = 0) -> CudaRuntime:
    """Let torch have this runtime."""
    runtime = CudaRuntime(refuses)
    patch.setattr(torch.cuda, "cudart", lambda: runtime)
    patch.setattr(torch.cuda, "device", runtime.on)
    patch.setattr(torch.version, "cuda", _NAME.rpartition(".")[2] + ".1")
    return runtime

"""A CUDA device, the page kernels that run on it, and the way in which its pages cross the link.

Nothing here needs torch or CuPy; both are used where they are there: the one for the engine's current stream, the other
to compile the kernels when this was built without nvcc.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from kvtier import _core

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CudaDevice", "CudaError", "compile_kernels"]

CudaError = _core.CudaError


def compile_kernels(capability: tuple[int, int]) -> bytes:
    """Machine code of the page kernels for a device of that compute capability, by CuPy's NVRTC; some 0.1 s.

    Raises :class:`CudaError` saying what is missing or what the compiler said.
    """
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise CudaError(
            f"the page kernels were not compiled when kvtier was built, and there is no compiler now ({error}); "
            "pip install '.[cuda]' in kvtier's source, or build kvtier where nvcc is"
        ) from None
    try:
        program = nvrtc.createProgram(
            _core.kernel_source(), "page_copy.cu", (_core.kernel_header().encode(),), (b"cuda/page_args.hpp",)
        )
        try:
            major, minor = capability
            nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"))
            return bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError as error:
            raise CudaError(f"NVRTC refuses the page kernels: {error}: {nvrtc.getProgramLog(program)}") from None
        finally:
            nvrtc.destroyProgram(program)
    except (RuntimeError, OSError, ImportError) as error:  # CuPy without the library
        if isinstance(error, CudaError):
            raise
        raise CudaError(f"NVRTC cannot be used: {error}") from None


class CudaDevice:
    """One CUDA device with the page kernels loaded; one object for each device of a process: :meth:`of`.

    ``name``, ``processors`` (streaming multiprocessors) and ``numa_node`` (of the nearest host memory, -1: not known)
    are the driver's words.
    """

    def __init__(self, native: _core.CudaDevice, stream: Callable[[], int] | None = None) -> None:
        self.native = native
        facts: dict[str, Any] = native.facts()
        self.name: str = facts["name"]
        self.ordinal: int = facts["ordinal"]
        self.processors: int = facts["processors"]
        self.numa_node: int = facts["numa_node"]
        self.driver: int = facts["driver"]
        self.emulated: bool = facts["emulated"]
        self._stream = stream

    @staticmethod
    def of(ordinal: int) -> CudaDevice:
        """The device of that number, opened at the first call. Raises :class:`CudaError` saying why it cannot be."""
        return _opened(ordinal)

    @classmethod
    def emulated_device(cls, seed: int = 0) -> Self:
        """A device that is host memory, for tests and dry runs: same copier, same kernels, queues run by ``seed``.

        ``native.make_stream()`` makes a stream of the engine's; give it as :attr:`stream`.
        """
        return cls(_core.CudaDevice.emulated(seed), lambda: 0)

    def follow(self, stream: Callable[[], int]) -> None:
        """Have ``stream()`` say on which CUDA stream (its handle) the engine's work is queued at present."""
        self._stream = stream

    def current_stream(self) -> int:
        """The handle of the stream on which the calling thread queues its work, as torch or CuPy says, else 0."""
        if self._stream is not None:
            return self._stream()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.current_stream(self.ordinal).cuda_stream)
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            with cupy.cuda.Device(self.ordinal):
                return int(cupy.cuda.get_current_stream().ptr)
        return 0

    def describe(self) -> str:
        """For people: name and number."""
        return self.name if self.emulated else f"{self.name} (CUDA device {self.ordinal})"


@cache
def _opened(ordinal: int) -> CudaDevice:
    status = _core.cuda_status()
    if status["note"]:
        raise CudaError(f"CUDA device {ordinal}: {status['note']}")
    if status["built_for"]:
        return CudaDevice(_core.CudaDevice.open(ordinal))
    return CudaDevice(_core.CudaDevice.open(ordinal, compile_kernels(_core.cuda_capability(ordinal))))

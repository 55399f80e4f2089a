"""What this machine has left: host memory, and the memory of the GPUs that llama.cpp can use."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.libraries import load

__all__ = ["Free", "available_bytes", "free_memory"]

_MEMINFO = Path("/proc/meminfo")
_GPU_TYPES = (1, 2)  # enum ggml_backend_dev_type: GPU, IGPU


@dataclass(frozen=True, kw_only=True)
class Free:
    """Bytes that can still be taken; None where the system does not tell, or has no GPU."""

    host: int | None = None
    device: int | None = None


def free_memory() -> Free:
    """What is free now; the memory of several GPUs is added up.

    Raises NativeError when the libraries are missing.
    """
    return Free(host=available_bytes(_MEMINFO), device=_device_bytes())


def available_bytes(meminfo: Path) -> int | None:
    """MemAvailable of Linux in bytes, None on other systems."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(values[0]) * 1024 if values else None


def _device_bytes() -> int | None:
    registry, devices = load("ggml"), load("ggml-base")
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    registry.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    devices.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    found = [registry.ggml_backend_dev_get(i) for i in range(registry.ggml_backend_dev_count())]
    gpus = [gpu for gpu in found if devices.ggml_backend_dev_type(gpu) in _GPU_TYPES]
    return sum(_free_bytes(devices, gpu) for gpu in gpus) if gpus else None


def _free_bytes(library: Any, device: int) -> int:
    """0 where a GPU does not tell: nothing may be planned on it then."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    query = library.ggml_backend_dev_memory
    query.restype, query.argtypes = None, [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2]
    query(device, ctypes.byref(free), ctypes.byref(total))
    return free.value

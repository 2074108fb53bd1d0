"""Device memory of another process on this host, opened by its name (CUDA IPC), through the driver's own calls.

Owns the name of a piece of memory as bytes, and what one must know to open it: the device, the allocation, the place in it.
Names can be opened by as many as like, as often as they like; torch's own way counts tensors that are each sent once. Only
memory on the very device that we compute on is opened. Whoever calls has made the device current on this thread.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch

from baton.core.errors import InvariantViolated

_NAME = struct.Struct("<36s64sQ")
"""Of the device; of the allocation; where in it ours begins."""
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def ipc_name(memory: torch.Tensor) -> bytes:
    """What opens this tensor's memory elsewhere; nothing where its allocator has it in no way that can be shared."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    driver = _driver()
    if driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(memory.data_ptr())):
        return b""
    if driver.cuIpcGetMemHandle(ctypes.byref(handle), base):
        return b""
    return _NAME.pack(_uuid(memory.device), bytes(handle.reserved), memory.data_ptr() - base.value)


class SharedMapping:
    """`size` bytes of another process, from `pointer` on."""

    def __init__(self, base: int, offset: int, size: int) -> None:
        self._base = base
        self.pointer = base + offset
        self.size = size

    def tensor(self, rows: int, device: torch.device) -> torch.Tensor:
        """[rows, bytes of each]; of no use after `close`."""
        return torch.as_tensor(_Foreign(self.pointer, (rows, self.size // rows)), device=device)

    def close(self) -> None:
        error = _driver().cuIpcCloseMemHandle(ctypes.c_uint64(self._base))
        if error:
            raise InvariantViolated(f"memory of another process cannot be closed: CUDA error {error}")


def open_ipc_name(name: bytes, size: int, device: torch.device) -> SharedMapping | str:
    """The memory of this name, of which `size` bytes are wanted. A string says why it cannot be had."""
    if len(name) != _NAME.size:
        return "that is no name of device memory"
    uuid, raw, offset = _NAME.unpack(name)
    if uuid != _uuid(device):
        return "it lies on another device"
    base, length = ctypes.c_uint64(), ctypes.c_size_t()
    driver = _driver()
    error = driver.cuIpcOpenMemHandle_v2(ctypes.byref(base), _IpcHandle.from_buffer_copy(raw), _LAZY_PEER_ACCESS)
    if error:
        return f"its device memory cannot be opened: CUDA error {error}"
    opened = SharedMapping(base.value, offset, size)
    error = driver.cuMemGetAddressRange_v2(None, ctypes.byref(length), base)
    if error or offset + size > length.value:
        opened.close()
        return "its device memory is shorter than its pool"
    return opened


class _Foreign:
    """Memory in the form in which torch takes it over without a copy."""

    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (pointer, False), "version": 3}


def _uuid(device: torch.device) -> bytes:
    return str(torch.cuda.get_device_properties(device).uuid).encode()


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    word, size = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
    library.cuMemGetAddressRange_v2.argtypes = (word, size, ctypes.c_uint64)
    library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_IpcHandle), ctypes.c_uint64)
    library.cuIpcOpenMemHandle_v2.argtypes = (word, _IpcHandle, ctypes.c_uint)
    library.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    return library

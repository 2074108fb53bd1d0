"""Device memory of another process on this host, opened by a CUDA IPC name through calls of the driver.

Owns the encoding of a name: the device, the allocation and the offset in it. A name can be opened any number of times by any
process; torch's own sharing counts tensors that are each sent once. Only memory on the device that we compute on is opened.
The caller has made the device current on its thread.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch

from baton.core.errors import InvariantViolated

_NAME = struct.Struct("<36s64sQ")
"""UUID of the device, handle of the allocation, offset of the memory in it."""
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def ipc_name(memory: torch.Tensor) -> bytes:
    """The name that opens this tensor's memory in another process; empty where its allocation cannot be shared."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    driver = _driver()
    if driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(memory.data_ptr())):
        return b""
    if driver.cuIpcGetMemHandle(ctypes.byref(handle), base):
        return b""
    return _NAME.pack(_uuid(memory.device), bytes(handle.reserved), memory.data_ptr() - base.value)


class SharedMapping:
    """`size` bytes of another process's memory, mapped at `pointer`."""

    def __init__(self, base: int, offset: int, size: int) -> None:
        self._base = base
        self.pointer = base + offset
        self.size = size

    def tensor(self, rows: int, device: torch.device) -> torch.Tensor:
        """[rows, bytes of each]; invalid after `close`."""
        return torch.as_tensor(_Foreign(self.pointer, (rows, self.size // rows)), device=device)

    def close(self) -> None:
        error = _driver().cuIpcCloseMemHandle(ctypes.c_uint64(self._base))
        if error:
            raise InvariantViolated(f"memory of another process cannot be closed: CUDA error {error}")


def open_ipc_name(name: bytes, size: int, device: torch.device) -> SharedMapping | str:
    """Map `size` bytes of the memory of this name. A string says why that is impossible."""
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
    """Exposes memory through `__cuda_array_interface__`, so that torch uses it without a copy."""

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

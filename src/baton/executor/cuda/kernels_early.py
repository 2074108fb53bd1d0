"""Helpers of Gluon kernels that begin before the preceding kernel has ended (launched with `launch_pdl`).

Before `await_inputs` such a kernel may read only memory that no kernel of the step writes. Every program of it must call
that, also without work: a kernel that waits for this one relies on it for all earlier ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

try:  # as newer releases call it
    from triton.experimental.gluon.language import barrier as all_threads
except ImportError:
    from triton.experimental.gluon.language import thread_barrier as all_threads

__all__ = ["all_threads", "await_inputs", "let_begin"]


@gluon.jit
def await_inputs():
    """Until the kernel before has ended."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_begin():
    """The kernel after may begin, once every program of this one has said so or ended."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

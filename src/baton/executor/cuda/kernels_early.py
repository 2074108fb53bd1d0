"""What kernels in Gluon share that begin before the kernel before them has ended (launched with `launch_pdl`).

Until `await_inputs` such a kernel may read only what no kernel of the step writes. Every program of it must call that, those
without work too: who waits for this kernel relies on it for all that came before.
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

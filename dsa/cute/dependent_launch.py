"""Programmatic dependent launch: a kernel's launch and prologue overlap the end of the previous kernel.

    @cute.kernel
    def kernel(self, ...):
        ...                                 # shared memory, barriers, TMA descriptors, arithmetic on parameters
        wait_for_prerequisite_grids()
        ...                                 # global memory

    self.kernel(...).launch(..., use_pdl=True)

Such a kernel begins when every CTA of the previous kernel has triggered the launch or has ended. The kernel cannot know
which tensors the previous kernel writes, so it neither reads nor writes global memory before the wait. A prefetch to L2
(copies.prefetch_to_l2) is allowed before the wait, because later writes of the previous kernel update L2, too.
"""

import cutlass.cute as cute


@cute.jit
def wait_for_prerequisite_grids():
    """Wait until all previous kernels of the stream have ended and their writes are visible; then trigger the next
    kernel's launch. All threads of all CTAs call this once, before any branch.

    The instruction waits only for the previous kernel. But the previous kernel ends only after all kernels before it:
    it either calls this function, too, or is launched without use_pdl.

    The next kernel begins only after every CTA of this kernel has started. If it could begin earlier, it could occupy
    the SM that a CTA of this kernel still needs. Other CTAs of this kernel could wait for that CTA without end.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

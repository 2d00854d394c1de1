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
    """Wait until all previous kernels have ended and their writes are visible; then trigger the next kernel's launch.
    All threads of all CTAs call this once, before any branch.

    The next kernel waits for this kernel alone. Because this kernel triggers only after its own wait, the next kernel's
    wait also covers all earlier kernels. The next kernel begins only after every CTA of this kernel has triggered, so
    all of these CTAs have started by then. So the next kernel never takes the SM of a CTA that has not started and for
    which other CTAs of this kernel wait.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

"""Programmatic dependent launch: a kernel's launch and prologue overlap the end of the previous kernel.

    @cute.kernel
    def kernel(self, ...):
        ...                                 # shared memory, barriers, TMA descriptors, arithmetic on parameters
        wait_for_prerequisite_grids()
        ...                                 # global memory

    self.kernel(...).launch(..., use_pdl=True)

Such a kernel begins when every CTA of the previous kernel has triggered the launch or has ended. It cannot know which
tensors the previous kernel writes, so it neither reads nor writes global memory before the wait. It may prefetch to L2
(copies.prefetch_to_l2), because later writes of the previous kernel update L2, too.
"""

import cutlass.cute as cute


@cute.jit
def wait_for_prerequisite_grids():
    """Wait until all previous kernels have ended and their writes are visible; then trigger the next kernel's launch.
    All threads of all CTAs call this once, before any branch.

    The next kernel waits for this kernel alone. Because this kernel triggers only after its own wait, the next kernel's
    wait also covers all earlier kernels. The next kernel begins when all CTAs of this kernel are resident, so it never
    occupies an SM that a CTA of this kernel still needs while other CTAs wait for that CTA.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

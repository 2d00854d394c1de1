"""Programmatic dependent launch: a kernel's launch and prologue overlap the end of the previous kernel.

    @cute.kernel
    def kernel(self, ...):
        ...                                 # shared memory, barriers, TMA descriptors, arithmetic on parameters
        wait_for_prerequisite_grids()
        ...                                 # global memory

    self.kernel(...).launch(..., use_pdl=True)

Such a kernel begins when every CTA of the previous one has triggered the launch or has ended. It cannot know which
tensors the previous kernel writes, so it neither reads nor writes global memory before the wait. It may prefetch to L2
(copies.prefetch_to_l2), because later writes update L2, too.
"""

import cutlass.cute as cute


@cute.jit
def wait_for_prerequisite_grids():
    """Wait until all previous kernels have ended and their writes are visible; then trigger the next kernel's launch.
    All threads of all CTAs call this once, before any branch.

    The trigger comes after the wait because the next kernel waits for this kernel alone: so its wait also covers
    earlier kernels. The next kernel begins when all CTAs of this one are resident, so it never takes the SM of a CTA
    that others wait for.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

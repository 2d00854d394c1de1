"""Programmatic dependent launch: a kernel's launch and set-up overlap the end of the kernel in front of it.

    @cute.kernel
    def kernel(self, ...):
        ...                                 # shared memory, barriers, TMA descriptors, arithmetic on parameters
        wait_for_prerequisite_grids()
        ...                                 # global memory

    self.kernel(...).launch(..., use_pdl=True)

A kernel launched so begins when every CTA of the one in front has let it in or has ended. Which tensors are constant it
cannot know, so it neither reads nor writes any before the wait. It may ask for bytes to be brought to the L2 cache
(copies.prefetch_to_l2): what is written there later is written to the L2 cache, too.
"""

import cutlass.cute as cute


@cute.jit
def wait_for_prerequisite_grids():
    """Wait until all kernels in front have ended and what they wrote is visible; then let the next kernel in. All
    threads of all CTAs call this, once, before any branch.

    The next kernel is let in only behind the wait: otherwise its own wait, which is for this kernel alone, would say
    nothing of those before. It comes when all CTAs of this one are resident, so it never takes the room of a CTA that
    others wait for.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

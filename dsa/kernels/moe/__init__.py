"""CuTe DSL kernels of mixtures of experts: router, gate, sort and combination."""

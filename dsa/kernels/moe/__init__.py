"""CuTe DSL kernels of mixtures of experts: gate, sort and combination."""

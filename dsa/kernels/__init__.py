"""CuTe DSL kernels for sm_90a, one folder per family. Importing a kernel imports the DSL, so ops import their kernels
at the first launch."""

"""CuTe DSL kernels for sm_90a, one family a file. Importing one imports the DSL, so ops do it when they launch."""

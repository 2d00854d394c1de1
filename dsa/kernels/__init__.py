"""CuTe DSL kernels for sm_90a, one folder per family. Importing a kernel imports the DSL, so a launch function imports
its kernels when it is called."""

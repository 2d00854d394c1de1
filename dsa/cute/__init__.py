"""Device and host code that several kernels share. Importing this package imports CUTLASS's CuTe DSL; `import dsa`
alone does not."""

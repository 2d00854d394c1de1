"""Device and host code that several kernels share. All modules but `limits` and `tuning` import CUTLASS's CuTe DSL;
`import dsa` imports none of them."""

"""Device and host code that several kernels share. The modules other than `limits` and `tuning` import CUTLASS's CuTe
DSL, so `import dsa` imports none of them."""

"""Host code that all ops and kernels share: declarations of ops, argument checks, recorded calls, backends, and
compilation with its cache."""

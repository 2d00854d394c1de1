"""Benchmark of an inference engine with and without dsa's plugin, on one GPU: `python -m dsa_bench.engines`.

Two processes hold the engine, one with the plugin and one without it. They take turns, so both see the same GPU in the
same minutes. The model has a published model's layer sizes and random weights; the routed experts of all layers are
one set of weights, so that many layers fit. An engine is used as a server uses it: requests arrive one by one and
stream their tokens.
"""

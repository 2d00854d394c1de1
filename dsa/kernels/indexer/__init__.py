"""CuTe DSL kernels of the lightning indexer: conversion of queries and keys to FP8, scores, and top-k selection."""

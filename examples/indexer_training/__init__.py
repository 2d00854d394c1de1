"""The parts of examples/train_indexer.py."""

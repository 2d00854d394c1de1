"""Batches of decoding that attention has kernels of their own for, by their numbers of queries."""

MOST_QUERIES = 512  # with more, no other kernels are chosen


def decoding_batches(num_sms: int) -> list[int]:
    """Numbers of queries, for each of which another kernel may be chosen. Those up to a seventh of the multiprocessors
    are the last that are split eight times."""
    return sorted({1, MOST_QUERIES, num_sms // 7, *(n << i for n in (2, 3) for i in range(8))})

"""Batch sizes for which warm-up runs decode attention, so that every kernel it can choose is compiled."""

MOST_QUERIES = 512  # larger batches use the same kernels


def decoding_batches(num_sms: int) -> list[int]:
    """Return numbers of queries that together need every kernel of decode attention.

    num_sms // 7 is the largest number of queries with an estimate of at least 8 splits per query, if a CTA computes all
    heads. With fewer splits, another combine kernel is chosen (`mla_combine_sm90.choose_config`).
    """
    return sorted({1, MOST_QUERIES, num_sms // 7, *(n << i for n in (2, 3) for i in range(8))})

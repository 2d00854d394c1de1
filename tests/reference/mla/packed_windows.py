"""Packed sequences and the keys that a window shows to each of their queries."""

CU_Q, CU_K = [0, 3, 3, 4, 10, 12], [0, 3, 5, 12, 30, 31]  # the last sequence has 2 queries and 1 key


def visible(window: int) -> list[list[int]]:
    """The keys of every query, from the definition."""
    rows = []
    for q0, q1, k0, k1 in zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:]):
        for i in range(q1 - q0):
            p = (k1 - k0) - (q1 - q0) + i
            rows.append([k0 + j for j in range(k1 - k0) if p - window < j <= p])
    return rows

"""Which keys a query sees. The one place where the window's convention is written down."""

FULL = -1


def visible(query, key, window: int):
    """True where the query at this position sees the key at that one: not later than itself, and with
    a window not more than window - 1 tokens earlier, so that it sees `window` tokens with its own."""
    causal = key <= query
    return causal if window == FULL else causal & (key > query - window)

"""What the stand-in for a trainer must have reached, and what a launcher must have said."""

import hashlib
import re


def chain(steps: int) -> str:
    """The stand-in's state after so many steps, computed here."""
    state = "start"
    for step in range(steps):
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
    return state


def said(lab, words: str) -> bool:
    return any(re.search(words, text) for text in lab.said)

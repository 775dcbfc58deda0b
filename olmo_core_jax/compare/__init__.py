"""Ours against the reference: curves, gaps, verdicts, from plain files; for both wings."""

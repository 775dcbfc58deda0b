"""The pieces of the laptop reference, one subject a file. Run them through ../make_reference.py."""

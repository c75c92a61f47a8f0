"""What computes with packed experts' decoded slices: torch (and later Triton) only.

reference.py    one projection of all experts, forward and backward, expert by expert
"""

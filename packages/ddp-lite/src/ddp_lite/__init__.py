"""Data-parallel training in four documented steps: naive, flat, overlapped, bucketed."""

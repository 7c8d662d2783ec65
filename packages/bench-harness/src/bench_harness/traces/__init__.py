"""Reads profiler traces: kernels per phase, and how much communication hides under computation."""

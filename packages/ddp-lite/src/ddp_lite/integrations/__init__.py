"""Use of the package by other libraries; nothing here is imported unless it is asked for."""

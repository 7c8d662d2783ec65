"""Measures and explains Transformer training: one command per experiment, one report."""

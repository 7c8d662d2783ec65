"""A small, exact Transformer language model with its optimizer, data pipeline and checkpoints."""

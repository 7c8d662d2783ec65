"""Training steps as data: what a variant is, how it is built, proven and measured."""

"""The assignment's questions and their answers: one table, one document, checks of other code."""

"""How numbers, tables and pictures look, whoever shows them."""

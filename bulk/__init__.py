"""Rows in, rows out: a file of any size is read row by row, and written with its results as a whole or not at all."""

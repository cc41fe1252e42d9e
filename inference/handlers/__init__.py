"""The built-in handlers, one a file."""

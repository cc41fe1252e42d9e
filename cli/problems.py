"""Errors of commands, told in one line."""


class CommandError(Exception):
    """A command cannot do what it was asked; the text says what to do."""

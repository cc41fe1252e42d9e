"""Errors of commands, told in one line."""


class CommandError(Exception):
    """A command cannot do what it was asked; the text says what to do."""

    exit_code = 1


class WrongOption(CommandError):
    """It was asked in a way that is never right, whatever the files and the service are like."""

    exit_code = 2
